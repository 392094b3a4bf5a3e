"""python -m recipes.inspect path=<checkpoint or folder of checkpoints>: show its content, or leave it as a page."""

if not __package__:  # run by path: sys.path[0] is this folder, and this file would hide the standard library's inspect
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("inspect", writes=False, trouble=2)
def main(cfg: DictConfig) -> int:
    from ckpt.cli.pages.inspect_page import InspectKeys, inspect
    from recipes.support.config import command_keys

    return inspect(command_keys(cfg, InspectKeys))


if __name__ == "__main__":
    main()
