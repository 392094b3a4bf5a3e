"""python -m recipes.diff a=<checkpoint> b=<checkpoint>: what changed between two checkpoints, of any formats."""

if not __package__:  # run by path: sys.path[0] is this folder, whose inspect.py would hide the standard library's
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("diff", writes=False, trouble=2)
def main(cfg: DictConfig) -> int:
    from ckpt.cli.comparing import DiffKeys, diff
    from recipes.support.config import command_keys

    return diff(command_keys(cfg, DiffKeys))


if __name__ == "__main__":
    main()
