"""python -m recipes.inspect path=<checkpoint or folder of checkpoints>: show its content, or leave it as a page."""

if not __package__:  # run by path: sys.path[0] is this folder, and this file would hide the standard library's inspect
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("inspect", writes=False)
def main(cfg: DictConfig) -> None:
    from recipes.commands.inspect_page import leave_page
    from recipes.commands.reading import inspect_keys_of, show

    keys = inspect_keys_of(cfg)
    if keys.html is not None:
        leave_page(keys)
    if keys.html is None or keys.json:
        show(keys)


if __name__ == "__main__":
    main()
