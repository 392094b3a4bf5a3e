"""The doctor over made-up fingerprints: every wrong declaration is caught and named, none of the right ones is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from ckpt.state.pattern_check import PatternVerdict, Seen, candidates, diagnose
from ckpt.state.replication import Fingerprint
from ckpt.state.sharing import Ranks, Sharing, SharingPattern

Value = Callable[[int], object]
"""What a rank holds of one entry; None: it has no such entry."""

FOUR = (0, 1, 2, 3)
GRID = {"tp_group": ((0, 1), (2, 3)), "dp_group": ((0, 2), (1, 3))}
STAGES = {"pp_group": ((0, 1), (2, 3)), "dp_group": ((0, 2), (1, 3))}


def ranks_of(groups: dict[str, tuple[tuple[int, ...], ...]], nodes: Sequence[Sequence[int]] = (FOUR,)) -> Ranks:
    return Ranks(tuple(tuple(node) for node in nodes), groups)


DP_TP = ranks_of(GRID)
DP_PP = ranks_of(STAGES)
TWO_HOSTS = ranks_of({"dp_group": (FOUR,)}, ((0, 1), (2, 3)))
DP_ONLY = ranks_of({})


def same(rank: int) -> object:
    return "same"


def by_rank(rank: int) -> object:
    return rank


def by_column(rank: int) -> object:
    """Equal for ranks 0 and 2, and for 1 and 3: what the members of a dp_group share."""
    return rank % 2


def by_row(rank: int) -> object:
    """Equal for neighbours: one host, one tp_group, one pp_group."""
    return rank // 2


def only_on(*ranks: int) -> Value:
    return lambda rank: "same" if rank in ranks else None


def tensor(value: object, shape: tuple[int, ...] = (64, 64)) -> Fingerprint:
    return Fingerprint("float32", shape, f"bits {value}")


def plain(value: object) -> Fingerprint:
    return Fingerprint("", (6 + len(str(value)),), f"value {value}")


def piece(first: int, value: object) -> Fingerprint:
    return Fingerprint("float32", (2, 3), f"bits {value}", f"[{first}:{first + 2}, 0:3] of [4, 3]")


def held(num: int = 4, **entries: tuple[Callable[[object], Fingerprint], Value]) -> list[Seen]:
    """By rank, the fingerprints; `__` in a name stands for a dot."""
    return [
        {
            name.replace("__", "."): make(value(rank))
            for name, (make, value) in entries.items()
            if value(rank) is not None
        }
        for rank in range(num)
    ]


def model(value: Value) -> list[Seen]:
    """Matrices that go by `value`, and norms and a step that are the same everywhere."""
    return held(
        wte__weight=(tensor, same),
        h__0__attn__weight=(tensor, value),
        h__0__ln__weight=(tensor, same),
        h__1__attn__weight=(tensor, value),
        h__1__ln__weight=(tensor, same),
    )


def optimizer(value: Value) -> list[Seen]:
    return held(
        state__h__0__attn__weight__step=(tensor, same),
        state__h__0__attn__weight__exp_avg=(tensor, value),
        state__h__0__attn__weight__exp_avg_sq=(tensor, value),
        param_groups__h__0__attn__weight__lr=(plain, same),
    )


def stage(first: Value, second: Value) -> list[Seen]:
    """Ranks of an even number hold the first layer, those of an odd one the second, by the names of the whole model."""
    return held(
        h__0__weight=(tensor, lambda r: first(r) if r % 2 == 0 else None),
        h__1__weight=(tensor, lambda r: second(r) if r % 2 else None),
    )


def generators(value: Value) -> list[Seen]:
    return held(python=(plain, value), torch__cpu=(plain, value), seed=(plain, same))


def wrapper(value: Value = by_rank) -> list[Seen]:
    """A wrapped optimizer: everything is replicated but a note that it keeps of its rank."""
    return [a | b for a, b in zip(optimizer(same), held(wrapper__device=(plain, value)), strict=True)]


def pieces(value: Value = same) -> list[Seen]:
    """A DTensor: even ranks hold the first rows, odd ones the last, in two copies."""
    return [{"w": piece(2 * (rank % 2), (rank % 2, value(rank)))} for rank in FOUR]


@dataclass
class Case:
    ranks: Ranks
    seen: list[Seen]
    declared: str
    verdict: PatternVerdict = PatternVerdict.OK
    says: tuple[str, ...] = ()
    found: str = ""


LOSES, WASTES, SUSPECT = PatternVerdict.LOSES_STATE, PatternVerdict.WASTEFUL, PatternVerdict.SUSPICIOUS
ATTN = "`state.h.0.attn.weight.exp_avg` and 1 more of 4 entries"

WRONG = {
    # data and tensor parallel, plain tensors: the weights of a tp_group are different shards
    "the optimizer, by the group that holds the shards": Case(
        DP_TP, optimizer(by_column), "per_group tp_group", LOSES,
        (f"optimizer is declared PER_GROUP tp_group, but its members differ in {ATTN}: ranks 0 and 1; ",
         "the group whose members agree is dp_group: declare component optimizer with sharing_pattern=per_group "
         "and process_group_name=dp_group"), "PER_GROUP dp_group",
    ),
    "the model, by the group that holds the shards": Case(
        DP_TP, model(by_column), "per_group tp_group", LOSES,
        ("its members differ in `h.0.attn.weight` and 1 more of 5 entries: ranks 0 and 1",
         "the group whose members agree is dp_group"), "PER_GROUP dp_group",
    ),
    "tensor-parallel shards as replicas": Case(
        DP_TP, model(by_column), "replicated", LOSES,
        ("model is declared REPLICATED, but ranks 0 and 1 differ in `h.0.attn.weight`", "whose members agree is dp_group"),
        "PER_GROUP dp_group",
    ),
    "tensor-parallel shards as one global copy": Case(
        DP_TP, model(by_column), "global", LOSES,
        ("declared GLOBAL, which keeps what rank 0 holds, but others differ from it in `h.0.attn.weight`",
         "ranks 0 and 1", "dp_group"), "PER_GROUP dp_group",
    ),
    "plain tensor-parallel shards as sharded": Case(
        DP_TP, model(by_column), "sharded", LOSES,
        ("declared SHARDED, but ranks 0 and 1 both hold `h.0.attn.weight`, and not the same", "dp_group"),
        "PER_GROUP dp_group",
    ),
    "tensor-parallel shards by host": Case(
        ranks_of(GRID, ((0, 1), (2, 3))), model(by_column), "per_node", LOSES,
        ("declared PER_NODE, but the ranks of one host differ in `h.0.attn.weight`", "ranks 0 and 1", "dp_group"),
        "PER_GROUP dp_group",
    ),
    "shards of which each rank writes its replica's, too": Case(
        DP_TP, optimizer(by_column), "per_rank", WASTES,
        ("declared PER_RANK, but ranks 0 and 2 hold equal bits", "for each of 4 copies, 0.098304 MB more than need be",
         "as PER_GROUP dp_group nothing is saved twice"), "PER_GROUP dp_group",
    ),
    "shards whose equal ranks are in no group": Case(
        ranks_of({"tp_group": GRID["tp_group"]}), model(by_column), "per_group tp_group", LOSES,
        ("its members differ", "the ranks that agree are [0, 2] and [1, 3], which is no process group of this run"),
        "PER_RANK",
    ),
    "a replicated model by a group": Case(
        DP_TP, model(same), "per_group dp_group", WASTES,
        ("declared PER_GROUP dp_group, but ranks 0 and 1 hold equal bits, which are saved once for each of 2 copies",
         "as REPLICATED nothing is saved twice"), "REPLICATED",
    ),
    # data and pipeline parallel: the ranks of a pp_group hold different stages
    "stages by the group of a pipeline": Case(
        DP_PP, stage(same, same), "per_group pp_group", LOSES,
        ("declared PER_GROUP pp_group, but its members differ in `h.0.weight` and 1 more of 2 entries: ranks 0 and 1",
         "which only rank 0 has", "together the ranks hold one state: declare component model with sharing_pattern=sharded"),
        "SHARDED",
    ),
    "stages as replicas": Case(
        DP_PP, stage(same, same), "replicated", LOSES,
        ("declared REPLICATED, but ranks 0 and 1 differ in `h.0.weight`", "together the ranks hold one state"), "SHARDED",
    ),
    "stages as one global copy": Case(
        DP_PP, stage(same, same), "global", LOSES,
        ("keeps what rank 0 holds, but others differ from it in `h.0.weight`",), "SHARDED",
    ),
    "stages named from zero on every rank, as sharded": Case(
        DP_PP, model(by_column), "sharded", LOSES,
        ("ranks 0 and 1 both hold `h.0.attn.weight`, and not the same", "the group whose members agree is dp_group"),
        "PER_GROUP dp_group",
    ),
    "stages of which every replica writes its own": Case(
        DP_PP, stage(same, same), "per_rank", WASTES,
        ("declared PER_RANK, but ranks 0 and 2 hold equal bits", "as SHARDED nothing is saved twice"), "SHARDED",
    ),
    "stages by the group of replicas, whose copies went apart": Case(
        DP_PP, stage(by_row, same), "per_group dp_group", LOSES,
        ("its members differ in `h.0.weight`: ranks 0 and 2",), "PER_RANK",
    ),
    "stages as sharded, whose copies went apart": Case(
        DP_PP, stage(by_row, same), "sharded", LOSES,
        ("declared SHARDED, but ranks 0 and 2 both hold `h.0.weight`, and not the same",), "PER_RANK",
    ),
    # hosts
    "what each host has, as replicas": Case(
        TWO_HOSTS, held(cache=(tensor, by_row)), "replicated", LOSES,
        ("but ranks 0 and 2 differ in `cache`", "the ranks of each host agree: declare component x with sharing_pattern=per_node"),
        "PER_NODE",
    ),
    "what each host has, by a group across hosts": Case(
        TWO_HOSTS, held(cache=(tensor, by_row)), "per_group dp_group", LOSES,
        ("declared PER_GROUP dp_group, but its members differ in `cache`: ranks 0 and 2", "the ranks of each host agree"),
        "PER_NODE",
    ),
    "what each rank has, by host": Case(
        TWO_HOSTS, held(cache=(tensor, by_rank)), "per_node", LOSES,
        ("the ranks of one host differ in `cache`: ranks 0 and 1; every rank has its own: declare component x "
         "with sharing_pattern=per_rank",), "PER_RANK",
    ),
    "what all have, by host": Case(
        TWO_HOSTS, held(cache=(tensor, same)), "per_node", WASTES,
        ("declared PER_NODE, but ranks 0 and 2 hold equal bits", "as REPLICATED nothing"), "REPLICATED",
    ),
    "what each host has, by rank": Case(
        TWO_HOSTS, held(cache=(tensor, by_row)), "per_rank", WASTES,
        ("declared PER_RANK, but ranks 0 and 1 hold equal bits", "as PER_NODE nothing"), "PER_NODE",
    ),
    # the three common mistakes
    "global weights of data parallel ranks": Case(
        DP_ONLY, model(same), "global", WASTES,
        ("model is declared GLOBAL, so rank 0 writes it alone, but all 4 ranks hold equal bits of it: as REPLICATED they share the "
         "writing, and can be compared: declare component model with sharing_pattern=replicated",), "REPLICATED",
    ),
    "replicated random generators": Case(
        DP_ONLY, generators(by_rank), "replicated", LOSES,
        ("rng is declared REPLICATED, but ranks 0 and 1 differ in `python` and 1 more of 3 entries (another plain value); "
         "every rank has its own: declare component rng with sharing_pattern=per_rank",), "PER_RANK",
    ),
    "an optimizer of data parallel ranks by rank": Case(
        DP_ONLY, optimizer(same), "per_rank", WASTES,
        ("optimizer is declared PER_RANK, but ranks 0 and 1 hold equal bits, which are saved once for each of 4 copies, 0.147456 MB "
         "more than need be; as REPLICATED nothing is saved twice: declare component optimizer with sharing_pattern=replicated",),
        "REPLICATED",
    ),
    # generators, wrappers, pieces
    "global random generators": Case(
        DP_ONLY, generators(by_rank), "global", SUSPECT,
        ("keeps what rank 0 holds, but others differ from it in `python`", "every rank has its own"), "PER_RANK",
    ),
    "generators of tensors as one global copy": Case(
        DP_ONLY, held(cpu=(tensor, by_rank)), "global", LOSES, ("others differ from it in `cpu`: ranks 0 and 1",), "PER_RANK",
    ),
    "generators of tensor-parallel ranks by the wrong group": Case(
        DP_TP, generators(by_row), "per_group dp_group", LOSES,
        ("its members differ in `python`", "the group whose members agree is tp_group"), "PER_GROUP tp_group",
    ),
    "a wrapper with a note of its rank, as replicas": Case(
        DP_ONLY, wrapper(), "replicated", LOSES,
        ("ranks 0 and 1 differ in `wrapper.device` (another plain value); the other 4 entries agree, and are the larger part: "
         "list what differs in the object's attribute rank_private, or make it a component of its own, per_rank",), "PER_RANK",
    ),
    "a wrapper with an entry on one rank alone": Case(
        DP_ONLY, wrapper(only_on(2)), "replicated", LOSES,
        ("ranks 0 and 2 differ in `wrapper.device` (which alone has it); ",), "SHARDED",
    ),
    "pieces of tensors whose copies went apart": Case(
        DP_TP, pieces(by_row), "sharded", LOSES,
        ("ranks 0 and 2 both hold `w` [0:2, 0:3] of [4, 3], and not the same",
         "the group whose members agree is tp_group"), "PER_GROUP tp_group",
    ),
    "pieces of tensors whose copies went apart, on ranks without groups": Case(
        DP_ONLY, pieces(by_row), "sharded", LOSES,
        ("ranks 0 and 2 both hold `w`", "no pattern fits pieces of one tensor that are not equal"), "",
    ),
    "what one rank lacks, as replicas": Case(
        DP_ONLY, held(a=(tensor, same), b=(tensor, only_on(0, 1, 2))), "replicated", LOSES,
        ("ranks 0 and 3 differ in `b` (which only rank 0 has)",), "SHARDED",
    ),
    "what rank 0 alone holds, as replicas": Case(
        DP_ONLY, held(log=(tensor, only_on(0))), "replicated", LOSES,
        ("ranks 0 and 1 differ in `log`", "rank 0 alone holds anything of it"), "GLOBAL",
    ),
}  # fmt: skip

RIGHT = {
    "tensor-parallel shards by the group of replicas": Case(DP_TP, model(by_column), "per_group dp_group"),
    "their optimizer": Case(DP_TP, optimizer(by_column), "per_group dp_group"),
    "shards without replicas, by rank": Case(ranks_of({"tp_group": (FOUR,)}), model(by_rank), "per_rank"),
    "DTensors": Case(DP_TP, pieces(), "sharded"),
    "DTensors declared replicated, which are sharded all the same": Case(DP_TP, pieces(), "replicated"),
    "DTensors declared global": Case(DP_TP, pieces(), "global"),
    "stages under the names of the whole model": Case(DP_PP, stage(same, same), "sharded"),
    "stages by the group of replicas": Case(DP_PP, stage(same, same), "per_group dp_group"),
    "stages without replicas, by rank": Case(
        ranks_of({"pp_group": ((0, 1),)}, ((0, 1),)), stage(same, same)[:2], "per_rank"
    ),
    "stages without replicas, sharded": Case(
        ranks_of({"pp_group": ((0, 1),)}, ((0, 1),)), stage(same, same)[:2], "sharded"
    ),
    "tied weights of the first and the last stage": Case(
        DP_PP, held(wte=(tensor, same), h0=(tensor, only_on(0, 2)), h1=(tensor, only_on(1, 3))), "sharded"
    ),
    "a replicated model": Case(DP_ONLY, model(same), "replicated"),
    "a replicated model by the group of all": Case(TWO_HOSTS, model(same), "per_group dp_group"),
    "a replicated model by its only host": Case(DP_ONLY, model(same), "per_node"),
    "a replicated optimizer": Case(DP_TP, optimizer(same), "replicated"),
    "a fresh optimizer, by rank": Case(DP_ONLY, held(param_groups__w__lr=(plain, same)), "per_rank"),
    "a fresh optimizer, by a group": Case(DP_TP, held(param_groups__w__lr=(plain, same)), "per_group dp_group"),
    "generators": Case(DP_TP, generators(by_rank), "per_rank"),
    "generators seeded alike": Case(DP_ONLY, generators(same), "per_rank"),
    "generators that tensor-parallel ranks share, by rank": Case(DP_TP, generators(by_row), "per_rank"),
    "generators that tensor-parallel ranks share, by their group": Case(DP_TP, generators(by_row), "per_group tp_group"),
    "positions in the data, equal at the start": Case(DP_ONLY, held(position=(plain, same)), "per_rank"),
    "a position that rank 0 alone keeps": Case(DP_ONLY, held(position=(plain, only_on(0))), "global"),
    "a schedule, global": Case(DP_ONLY, held(last_epoch=(plain, same)), "global"),
    "a cache of each host": Case(TWO_HOSTS, held(cache=(tensor, by_row)), "per_node"),
    "notes of each rank": Case(TWO_HOSTS, held(cache=(tensor, by_rank)), "per_rank"),
    "what rank 0 alone holds": Case(DP_ONLY, held(log=(tensor, only_on(0))), "global"),
    "ranks of a host that hold no tensors beside a host that does": Case(
        ranks_of({}, ((0, 1), (2,))), held(3, n=(plain, same), cache=(tensor, only_on(2))), "per_rank"
    ),
    "nothing at all": Case(DP_ONLY, held(), "replicated"),
    "one rank, global": Case(ranks_of({}, ((0,),)), model(same)[:1], "global"),
    "one rank, by rank": Case(ranks_of({}, ((0,),)), model(same)[:1], "per_rank"),
    "a wrapper whose notes are each rank's, by rank": Case(DP_ONLY, wrapper(), "per_rank"),
}  # fmt: skip


def component_of(case: Case) -> str:
    keys = next(iter(case.seen), {}) if case.seen else {}
    if "python" in keys:
        return "rng"
    return "optimizer" if any(key.startswith("state.") for key in keys) else "model" if "h.0.weight" in keys or (
        "wte.weight" in keys) else "x"  # fmt: skip


def sharing_of(text: str) -> Sharing:
    pattern, _, group = text.partition(" ")
    return Sharing(SharingPattern(pattern), group or None)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_declaration_is_caught_and_the_sentence_says_what_is_true(name: str) -> None:
    case = WRONG[name]
    found = diagnose(component_of(case), sharing_of(case.declared), case.seen, case.ranks)
    assert found.verdict is case.verdict
    for text in case.says:
        assert text in found.sentence
    assert [str(one) for one in found.found[:1]] == ([case.found] if case.found else [])
    if case.verdict in (LOSES, SUSPECT):
        a, b = found.ranks
        assert found.leaf is not None
        assert case.seen[a].get(found.leaf) != case.seen[b].get(found.leaf)


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_of_a_right_declaration(name: str) -> None:
    case = RIGHT[name]
    found = diagnose(component_of(case), sharing_of(case.declared), case.seen, case.ranks)
    assert (found.verdict, found.sentence, found.leaf) == (PatternVerdict.OK, "", None)


def test_the_set_is_as_large_as_was_asked_for() -> None:
    assert len(WRONG) >= 20
    assert len(RIGHT) >= 20


@pytest.mark.parametrize("name", WRONG)
def test_what_the_doctor_proposes_it_would_not_refuse(name: str) -> None:
    case = WRONG[name]
    for proposed in diagnose("x", sharing_of(case.declared), case.seen, case.ranks).found:
        assert diagnose("x", proposed, case.seen, case.ranks).verdict is not PatternVerdict.LOSES_STATE


def test_candidates_come_with_the_fewest_copies_first() -> None:
    ranks = Ranks(
        ((0, 1, 2, 3), (4, 5, 6, 7)), {"pairs": ((0, 1), (2, 3), (4, 5), (6, 7)), "odd": ((0, 2, 4, 6), (1, 3, 5, 7))}
    )
    seen = held(8, w=(tensor, lambda rank: rank // 4))
    assert [str(one) for one in candidates(seen, ranks)] == ["PER_NODE", "PER_GROUP pairs", "PER_RANK"]


def test_a_diagnosis_is_json_for_those_who_read_it_by_machine() -> None:
    found = diagnose("rng", sharing_of("replicated"), generators(by_rank), DP_ONLY)
    assert found.to_json() == {
        "component": "rng",
        "declared": "REPLICATED",
        "found": ["PER_RANK"],
        "verdict": "loses state",
        "sentence": found.sentence,
        "leaf": "python",
        "ranks": [0, 1],
    }


def test_five_thousand_entries_on_1024_ranks_are_diagnosed_in_seconds() -> None:
    """The lead does it alone, while all others wait. Ranks that sent equal digests share one mapping."""
    groups = {"dp_group": tuple(tuple(range(first, 1024, 8)) for first in range(8))}
    leaves = [{f"h.{n}.weight": tensor((n, rank % 8)) for n in range(5_000)} for rank in range(8)]
    started = time.perf_counter()
    found = diagnose(
        "model",
        sharing_of("replicated"),
        [leaves[rank % 8] for rank in range(1024)],
        Ranks((tuple(range(1024)),), groups),
    )
    assert str(found.found[0]) == "PER_GROUP dp_group"
    assert time.perf_counter() - started < 60
