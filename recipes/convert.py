"""python -m recipes.convert src=<checkpoint> dst=<new folder> to=<format>: write a checkpoint in another format."""

if not __package__:  # run by path: sys.path[0] is this folder, whose inspect.py would hide the standard library's
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from dataclasses import asdict

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("convert", writes=False, trouble=2)
def main(cfg: DictConfig) -> None:
    from ckpt.cli.converting import ConvertKeys, convert_on_ranks, run_of, show
    from ckpt.cli.converting_megatron import Converted
    from recipes.support.config import command_keys, popped_keys
    from recipes.support.launch import CPU_RANKS, RanksKeys, launch

    ranks = popped_keys(cfg, RanksKeys)
    keys = command_keys(cfg, ConvertKeys)
    if (found := launch(convert_on_ranks, run_of(keys) | CPU_RANKS | asdict(ranks))) is not None:
        show(Converted(**found), keys)


if __name__ == "__main__":
    main()
