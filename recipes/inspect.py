"""python -m recipes.inspect path=<checkpoint or folder of checkpoints>: show its content, or leave it as a page."""

if not __package__:  # run by path: sys.path[0] is this folder, and this file would hide the standard library's inspect
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("inspect", writes=False)
def main(cfg: DictConfig) -> None:
    from ckpt.cli.pages.inspect_page import leave_page
    from ckpt.cli.reading import InspectKeys, show
    from recipes.support.config import command_keys

    keys = command_keys(cfg, InspectKeys)
    if keys.html is not None:
        leave_page(keys)
    if keys.html is None or keys.json:
        show(keys)


if __name__ == "__main__":
    main()
