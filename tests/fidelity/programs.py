"""Table of training programs around objects of public packages: optimizers, schedulers, averages, metrics, adapters, loaders.

docs/kept.md shows it, test_programs.py runs each. A package is imported when a program of it is made.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class Program(NamedTuple):
    """A training program.

    Attributes:
        objects: name -> object, as a `Checkpointer` is given them.
        step: makes a step, given its number, and returns all that two equal programs have alike after it.
        loaded: to be called after a load.
    """

    objects: dict[str, Any]
    step: Callable[[int], Any]
    loaded: Callable[[], None] = lambda: None


Make = Callable[[int], Program]
"""Makes a program from a seed."""


class Case(NamedTuple):
    """A kind of program.

    Attributes:
        package: module to import.
        name: the object, as the page shows it.
        refused: part of the error at the save; "": it is kept.
        instead: advice for a refused one.
    """

    package: str
    name: str
    make: Make
    refused: str = ""
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.package}: {self.name}"


def cases() -> Iterator[Case]:
    for table in (
        _torch,
        _transformers,
        _accelerate,
        _metrics,
        _peft,
        _torchao,
        _torchdata,
        _pytorch_optimizer,
        _others,
    ):
        yield from table()


def _of(path: str) -> Any:
    """Import an object by its dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _net(seed: int, *, biases: bool = True, width: int = 8) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, width, bias=biases), torch.nn.Tanh(), torch.nn.Linear(width, 4, bias=biases)
    )


def _loss(model: Any, step: int) -> torch.Tensor:
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
    out: torch.Tensor = model(inputs)
    return (out - 1).square().mean()


def _stepping(
    model: torch.nn.Module, optimizer: Any, *then: Callable[[], Any], graph: bool = False, closure: bool = False
) -> Callable[[int], Any]:
    """Return a function that makes a training step, calls `then`, and returns the parameters.

    Args:
        graph: the optimizer takes second derivatives.
        closure: it calls the model itself.
    """

    def step(number: int) -> Any:
        random.seed(number)
        torch.manual_seed(number)

        def backward() -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, number)
            loss.backward(create_graph=graph)
            return loss

        with torch.compiler.set_stance("force_eager"):  # compilation takes seconds, and changes no state
            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
        for one in then:
            one()
        return [parameter.detach().clone() for parameter in model.parameters()]

    return step


def _optimizer(
    make: Callable[[Any], Any] | str, *, width: int = 8, biases: bool = True, train: bool = False, **how: Any
) -> Make:
    """Return the maker of a program around an optimizer.

    Args:
        make: given the parameters; or the path of a class whose defaults will do.
        train: it has a `train()` to call first.
        how: see `_stepping`.
    """

    def program(seed: int) -> Program:
        model = _net(seed, width=width, biases=biases)
        optimizer = _of(make)(model.parameters()) if isinstance(make, str) else make(model.parameters())
        if train:
            optimizer.train()
        return Program({"model": model, "optimizer": optimizer}, _stepping(model, optimizer, **how))

    return program


def _of_model(make: Callable[[Any], Any]) -> Make:
    """Return the maker of a program around an optimizer that takes the model."""

    def program(seed: int) -> Program:
        model = _net(seed)
        optimizer = make(model)
        return Program({"model": model, "optimizer": optimizer}, _stepping(model, optimizer))

    return program


def _scheduler(make: Callable[[Any], Any], *, metric: tuple[float, ...] = ()) -> Make:
    def program(seed: int) -> Program:
        model = _net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return Program(objects, _stepping(model, optimizer, lambda: scheduler.step(*metric)))

    return program


def _average(make: Callable[[Any], Any], update: Callable[[Any, Any], Any]) -> Make:
    """Return the maker of a program around an average of the weights."""

    def program(seed: int) -> Program:
        model = _net(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        average = make(model)
        objects = {"model": model, "optimizer": optimizer, "average": average}
        return Program(objects, _stepping(model, optimizer, lambda: update(average, model)))

    return program


def _torch() -> Iterator[Case]:
    swa = torch.optim.swa_utils

    def scaler(seed: int) -> Program:
        model = _net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

        def step(number: int) -> Any:
            optimizer.zero_grad()
            scaler.scale(_loss(model, number)).backward()
            scaler.step(optimizer)
            scaler.update()
            return [*(one.detach().clone() for one in model.parameters()), scaler.get_scale()]

        return Program({"model": model, "optimizer": optimizer, "scaler": scaler}, step)

    def updated(average: Any, model: Any) -> None:
        average.update_parameters(model)

    yield Case("torch", "AveragedModel", _average(swa.AveragedModel, updated))
    yield Case(
        "torch",
        "AveragedModel, exponential",
        _average(lambda model: swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9)), updated),
    )
    yield Case("torch", "SWALR", _scheduler(lambda optimizer: swa.SWALR(optimizer, 0.05, anneal_epochs=3)))
    yield Case("torch", "GradScaler", scaler)


def _transformers() -> Iterator[Case]:
    package = "transformers"
    more: dict[str, dict[str, Any]] = {
        "linear": {},
        "cosine": {},
        "cosine_with_restarts": {},
        "polynomial": {},
        "constant": {},
        "constant_with_warmup": {},
        "inverse_sqrt": {},
        "cosine_with_min_lr": {"min_lr_rate": 0.1},
        "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
        "warmup_stable_decay": {"num_decay_steps": 5},
    }

    def schedule(kind: str) -> Callable[[Any], Any]:
        return lambda optimizer: _of("transformers.get_scheduler")(
            kind, optimizer, 2, 20, scheduler_specific_kwargs=more[kind]
        )

    for kind in more:
        yield Case(package, f"schedule {kind}", _scheduler(schedule(kind)))
    yield Case(
        package,
        "schedule reduce_lr_on_plateau",
        _scheduler(lambda optimizer: _of("transformers.get_reduce_on_plateau_schedule")(optimizer), metric=(1.0,)),
    )
    adafactor = "transformers.optimization.Adafactor"
    yield Case(package, "Adafactor", _optimizer(adafactor))
    yield Case(
        package,
        "Adafactor, momentum",
        _optimizer(lambda given: _of(adafactor)(given, lr=0.1, relative_step=False, scale_parameter=False, beta1=0.9)),
    )

    def with_schedule(seed: int) -> Program:
        model = _net(seed)
        optimizer = _of(adafactor)(model.parameters())
        scheduler = _of("transformers.optimization.AdafactorSchedule")(optimizer)
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return Program(objects, _stepping(model, optimizer, scheduler.step))

    yield Case(package, "AdafactorSchedule", with_schedule)


def _accelerate() -> Iterator[Case]:
    def prepared(seed: int) -> Program:
        model = _net(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        accelerator = _of("accelerate.Accelerator")(cpu=True)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return Program(objects, _stepping(model, optimizer, scheduler.step))

    yield Case("accelerate", "AcceleratedOptimizer, AcceleratedScheduler", prepared)


def _metrics() -> Iterator[Case]:
    def metric(make: Callable[[], Any]) -> Make:
        def program(seed: int) -> Program:
            one = make()
            for part in [one] if hasattr(one, "persistent") else one.values():
                part.persistent(True)

            def step(number: int) -> Any:
                generator = torch.Generator().manual_seed(number)
                scores = torch.rand(4, 3, generator=generator).softmax(-1)
                one.update(scores, torch.randint(0, 3, (4,), generator=generator))
                return one.compute()

            return Program({"quality": one}, step)

        return program

    def aggregate(name: str) -> Make:
        def program(seed: int) -> Program:
            one = _of(f"torchmetrics.{name}")()
            one.persistent(True)

            def step(number: int) -> Any:
                one.update(torch.rand(3, generator=torch.Generator().manual_seed(number)))
                return one.compute()

            return Program({"quality": one}, step)

        return program

    def of(*names: str) -> list[Any]:
        return [_of(f"torchmetrics.classification.{name}")(3) for name in names]

    for name in ("MeanMetric", "CatMetric", "MaxMetric"):
        yield Case("torchmetrics", name, aggregate(name))
    for name in ("MulticlassAccuracy", "MulticlassAUROC", "MulticlassConfusionMatrix"):
        yield Case("torchmetrics", name, metric(lambda name=name: of(name)[0]))
    pair = ("MulticlassAccuracy", "MulticlassF1Score")
    yield Case("torchmetrics", "MetricCollection", metric(lambda: _of("torchmetrics.MetricCollection")(of(*pair))))


def _peft() -> Iterator[Case]:
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "LoRA": ("LoraConfig", {"r": 2}),
        "LoRA, dropout and a saved layer": (
            "LoraConfig",
            {"r": 2, "lora_dropout": 0.1, "target_modules": ["0"], "modules_to_save": ["2"]},
        ),
        "DoRA": ("LoraConfig", {"r": 2, "use_dora": True}),
        "PiSSA": ("LoraConfig", {"r": 2, "init_lora_weights": "pissa"}),
        "IA3": ("IA3Config", {"feedforward_modules": ["2"]}),
        "LoHa": ("LoHaConfig", {"r": 2}),
        "LoKr": ("LoKrConfig", {"r": 2}),
        "BOFT": ("BOFTConfig", {"boft_block_size": 2}),
        "VeRA": ("VeraConfig", {"r": 2, "target_modules": ["0"]}),
        "AdaLoRA": ("AdaLoraConfig", {"total_step": 100}),
    }

    def adapted(config: str, options: dict[str, Any]) -> Make:
        def program(seed: int) -> Program:
            base = _net(0)
            torch.manual_seed(seed)
            model = _of("peft.get_peft_model")(base, _of(f"peft.{config}")(**{"target_modules": ["0", "2"], **options}))
            optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
            return Program({"model": model, "optimizer": optimizer}, _stepping(model, optimizer))

        return program

    for name, (config, options) in kinds.items():
        yield Case("peft", name, adapted(config, options))


def _torchao() -> Iterator[Case]:
    package = "torchao"
    for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"):
        yield Case(package, name, _optimizer(f"torchao.optim.{name}", width=1024))  # smaller states are not quantized

    def quantized(config: str) -> Make:
        def program(seed: int) -> Program:
            torch.manual_seed(0)
            wide = [torch.nn.Linear(6, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)]
            model = torch.nn.Sequential(*wide)
            chosen = _of(f"torchao.quantization.{config}")()
            _of("torchao.quantization.quantize_")(model, chosen, filter_fn=lambda _, name: name == "1")
            torch.manual_seed(seed)
            torch.nn.init.normal_(wide[0].weight)
            optimizer = torch.optim.AdamW([*wide[0].parameters(), *wide[2].parameters()], lr=0.05)
            return Program({"model": model, "optimizer": optimizer}, _stepping(model, optimizer))

        return program

    for config in (
        "Int8WeightOnlyConfig",
        "Float8WeightOnlyConfig",
        "IntxWeightOnlyConfig",
    ):
        yield Case(package, f"weights of {config}", quantized(config))
    dynamic = "Int8DynamicActivationInt8WeightConfig"
    yield Case(
        package,
        f"weights of {dynamic}",
        quantized(dynamic),
        "QuantizeTensorToInt8Kwargs",
        "weights of Int8WeightOnlyConfig",
    )


def _torchdata() -> Iterator[Case]:
    def read(make: Callable[[int], Any]) -> Make:
        """Return the maker of a program that reads a loader, again from its beginning when it ends."""

        def program(seed: int) -> Program:
            loader = make(seed)
            at: list[Any] = []

            def step(number: int) -> Any:
                at[:] = at or [iter(loader)]
                batch = next(at[0], None)
                if batch is None:
                    at.clear()
                return batch

            return Program({"data": loader}, step, at.clear)

        return program

    def loader(**options: Any) -> Callable[[int], Any]:
        return lambda seed: _of("torchdata.stateful_dataloader.StatefulDataLoader")(
            torch.arange(40.0).reshape(20, 2), batch_size=2, generator=torch.Generator().manual_seed(seed), **options
        )

    def nodes(seed: int) -> Any:
        module = importlib.import_module("torchdata.nodes")
        data = list(range(40))
        node = module.MapStyleWrapper(data, sampler=torch.utils.data.SequentialSampler(data))
        return module.Loader(module.Prefetcher(module.Batcher(node, 2), 2))

    def mixed(seed: int) -> Any:
        module = importlib.import_module("torchdata.nodes")
        sources = {name: module.IterableWrapper(range(first, first + 20)) for name, first in (("x", 0), ("y", 100))}
        node = module.MultiNodeWeightedSampler(sources, {"x": 0.5, "y": 0.5}, seed=seed)
        return module.Loader(module.Batcher(node, 2))

    yield Case("torchdata", "StatefulDataLoader", read(loader()))
    yield Case("torchdata", "StatefulDataLoader, shuffled", read(loader(shuffle=True)))
    yield Case("torchdata", "StatefulDataLoader, two workers", read(loader(num_workers=2)))
    yield Case("torchdata", "nodes.Loader", read(nodes))
    yield Case("torchdata", "nodes.MultiNodeWeightedSampler", read(mixed))


_BY_DEFAULTS = [
    "A2Grad", "ADOPT", "ASGD", "AccSGD", "AdEMAMix", "AdaBelief", "AdaBound", "AdaDelta", "AdaFactor", "AdaGC", "AdaMax", "AdaMod",
    "AdaNorm", "AdaPNM", "AdaShift", "AdaSmooth", "AdaTAM", "Adai", "Adalite", "Adam", "AdamC", "AdamG", "AdamP", "AdamS", "AdamW",
    "AdamWSN", "Adan", "AggMo", "Aida", "Alice", "Amos", "Ano", "ApolloDQN", "AvaGrad", "BCOS", "CAME", "DAdaptAdaGrad",
    "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "DASH", "DiffGrad", "DualAdam", "EXAdam", "EmoFact", "EmoLynx",
    "EmoNavi", "FAdam", "FOCUS", "FTRL", "FlashAdamW", "Fromage", "Grams", "Gravity", "GrokFastAdamW", "Kate", "Kron", "LARS",
    "LaProp", "Lamb", "Lion", "LoRARite", "MADGRAD", "MARS", "MSVAG", "Magma", "NAdam", "Nero", "NovoGrad", "PAdam", "PID", "PNM",
    "Prodigy", "QHAdam", "QHM", "RACS", "RAdam", "RMSprop", "ROSE", "Ranger", "SCION", "SCIONLight", "SGD", "SGDP", "SGDSaI",
    "SGDW", "SM3", "SOAP", "SPAM", "SPlus", "SRMM", "SWATS", "SaRA", "Shampoo", "SignSGD", "SimplifiedAdEMAMix", "StableAdamW",
    "StableSPAM", "TAM", "Tiger", "VSGD", "Yogi",
]  # fmt: skip
NOT_RUN = {
    "BSAM": "fails at its first step with this version of torch",
    "DeMo": "needs a process group",
    "DistributedMuon": "needs a process group",
}
"""Optimizers of pytorch_optimizer that are in no case, and why."""


def _pytorch_optimizer() -> Iterator[Case]:
    package = "pytorch_optimizer"

    def of(name: str, *args: Any, **options: Any) -> Callable[[Any], Any]:
        return lambda given: _of(f"{package}.{name}")(given, *args, **options)

    for name in _BY_DEFAULTS:
        lr = {"lr": 0.01} if name in ("QHM", "LoRARite") else {}
        yield Case(package, name, _optimizer(of(name, **lr)))
    for name in ("AdaHessian", "SophiaH"):
        yield Case(package, name, _optimizer(of(name), graph=True))
    for name in ("ScheduleFreeAdamW", "ScheduleFreeRAdam", "ScheduleFreeSGD"):
        yield Case(package, name, _optimizer(of(name), train=True))
    for name in ("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon"):
        yield Case(package, name, _of_model(lambda model, name=name: of(name)(_muon_groups(model))))
    yield Case(package, "AdamMini", _of_model(of("AdamMini")))
    yield Case(package, "LBFGS", _optimizer(of("LBFGS", lr=0.1), closure=True))
    yield Case(package, "Ranger21", _optimizer(of("Ranger21", num_iterations=30)))
    yield Case(package, "SpectralSphere", _optimizer(of("SpectralSphere"), biases=False))

    def alig(seed: int) -> Program:
        model = _net(seed)
        optimizer = of("AliG")(model.parameters())

        def step(number: int) -> Any:
            optimizer.zero_grad()
            loss = _loss(model, number)
            loss.backward()
            optimizer.step(lambda: loss)
            return [one.detach().clone() for one in model.parameters()]

        return Program({"model": model, "optimizer": optimizer}, step)

    def fused(name: str) -> Make:
        def program(seed: int) -> Program:
            model = _net(seed)
            optimizer = of(name, lr=0.01)(model)

            def step(number: int) -> Any:
                optimizer.zero_grad()
                optimizer.fused_backward(_loss(model, number), 0.01)
                return [one.detach().clone() for one in model.parameters()]

            return Program({"model": model, "optimizer": optimizer}, step)

        return program

    def surgery(seed: int) -> Program:
        model = _net(seed)
        optimizer = of("PCGrad")(torch.optim.AdamW(model.parameters(), lr=0.05))

        def step(number: int) -> Any:
            torch.manual_seed(number)
            optimizer.zero_grad()
            optimizer.pc_backward([_loss(model, number), _loss(model, number + 1)])
            optimizer.step()
            return [one.detach().clone() for one in model.parameters()]

        return Program({"model": model, "optimizer": optimizer}, step)

    yield Case(package, "AliG", alig)
    yield from (Case(package, name, fused(name)) for name in ("LOMO", "AdaLOMO"))
    yield Case(package, "PCGrad", surgery)

    def around(name: str, **options: Any) -> Callable[[Any], Any]:
        return lambda given: _of(f"{package}.{name}")(torch.optim.AdamW(given, lr=0.05), **options)

    yield Case(package, "Lookahead", _optimizer(around("Lookahead", k=3)))
    yield Case(package, "Lookahead, pullback", _optimizer(around("Lookahead", k=3, pullback_momentum="pullback")))
    yield from (Case(package, name, _optimizer(around(name))) for name in ("OrthoGrad", "TRAC"))
    yield Case(package, "ScheduleFreeWrapper", _optimizer(around("ScheduleFreeWrapper"), train=True))
    for name in ("SAM", "FriendlySAM", "LookSAM"):
        yield Case(package, name, _optimizer(of(name, torch.optim.SGD, lr=0.1, momentum=0.9), closure=True))

    def wsam(seed: int) -> Program:
        model = _net(seed)
        optimizer = _of(f"{package}.WSAM")(model, model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        return Program({"model": model, "optimizer": optimizer}, _stepping(model, optimizer, closure=True))

    yield Case(package, "WSAM", wsam)
    restarts = "CosineAnnealingWarmupRestarts"
    given = {"first_cycle_steps": 5, "max_lr": 0.1, "min_lr": 0.01, "warmup_steps": 2}
    yield Case(package, restarts, _scheduler(lambda optimizer: of(restarts, **given)(optimizer)))
    yield Case(package, "REXScheduler", _scheduler(of("REXScheduler", 12)))
    for kind, numbers in {"warmup_stable_decay": (2, 5, 5), "chebyshev": (16,)}.items():
        yield Case(
            package,
            f"schedule {kind}",
            _scheduler(
                lambda optimizer, kind=kind, n=numbers: _of(f"{package}.load_lr_scheduler")(kind)(optimizer, *n)
            ),
        )
    ranks = {"rank": 2, "update_proj_gap": 3, "scale": 1.0, "projection_type": "std", "scale_type": "tensor"}
    for name in ("Conda", "GaLore", "Fira", "APOLLO"):

        def low_rank(model: Any, name: str = name) -> Any:
            return of(name, lr=0.01)([{"params": list(model.parameters()), **ranks}])

        yield Case(package, name, _of_model(low_rank), "GaLoreProjector", "none that keeps its state")
    yield Case(package, "ScalableShampoo", _optimizer(of("ScalableShampoo")), "PreConditioner", "Shampoo")
    warm = {"t_max": 12, "max_lr": 0.1, "min_lr": 0.01, "init_lr": 0.02, "warmup_steps": 3}
    for name in ("CosineScheduler", "LinearScheduler"):
        lacks = f"{name} has no state_dict/load_state_dict pair"
        yield Case(package, name, _scheduler(of(name, **warm)), lacks, "a scheduler of torch")


def _muon_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    given = list(model.parameters())
    return [{"params": [one for one in given if (one.dim() == 2) is flag], "use_muon": flag} for flag in (True, False)]


def _others() -> Iterator[Case]:
    package = "schedulefree"
    for name in ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree", "AdamWScheduleFreePaper"):
        yield Case(package, name, _optimizer(f"{package}.{name}", train=True))
    for name in ("AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure"):
        yield Case(package, name, _optimizer(f"{package}.{name}", closure=True))

    def wrapped(given: Any) -> Any:
        return _of("schedulefree.ScheduleFreeWrapper")(torch.optim.SGD(given, lr=0.05), momentum=0.9)

    yield Case(package, "ScheduleFreeWrapper", _optimizer(wrapped, train=True))
    for name in ("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"):
        yield Case("dadaptation", name, _optimizer(f"dadaptation.{name}"))
    yield Case("prodigyopt", "Prodigy", _optimizer("prodigyopt.Prodigy"))
    yield Case("lion_pytorch", "Lion", _optimizer("lion_pytorch.Lion"))

    def shadow(model: Any) -> Any:
        return _of("torch_ema.ExponentialMovingAverage")(model.parameters(), decay=0.9)

    def shadow_and_own(model: Any) -> Any:
        average = shadow(model)
        average.store()
        return average

    def updated(average: Any, model: Any) -> None:
        average.update()

    yield Case("torch_ema", "ExponentialMovingAverage", _average(shadow, updated))
    yield Case("torch_ema", "ExponentialMovingAverage, stored weights", _average(shadow_and_own, updated))
    options = {"beta": 0.9, "update_after_step": 1, "update_every": 2}
    yield Case("ema_pytorch", "EMA", _average(lambda model: _of("ema_pytorch.EMA")(model, **options), updated))
    karras = _average(lambda model: _of("ema_pytorch.KarrasEMA")(model, gamma=6.9), updated)
    yield Case("ema_pytorch", "KarrasEMA", karras)
    for name in (
        "Adam8bit",
        "AdamW8bit",
        "Lion8bit",
        "RMSprop8bit",
        "Adagrad8bit",
        "AdEMAMix8bit",
        "PagedAdamW8bit",
        "AdamW32bit",
        "LAMB",
    ):
        yield Case("bitsandbytes", name, _optimizer(f"bitsandbytes.optim.{name}", width=1024))
    sgd = _optimizer(lambda given: _of("bitsandbytes.optim.SGD8bit")(given, lr=0.1, momentum=0.9), width=1024)
    yield Case("bitsandbytes", "SGD8bit", sgd)


CASES = list(cases())
