"""python -m recipes.bisect run=<run folder> bad=<run folder>: at which step, and in which component, two runs part."""

if not __package__:  # run by path: sys.path[0] is this folder, whose inspect.py would hide the standard library's
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("bisect", writes=False, trouble=2)
def main(cfg: DictConfig) -> int:
    from recipes.commands.bisecting import BisectKeys, bisect
    from recipes.support.config import command_keys

    return bisect(command_keys(cfg, BisectKeys))


if __name__ == "__main__":
    main()
