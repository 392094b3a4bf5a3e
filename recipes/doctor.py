"""Train a few steps and say which sharing pattern each component truly has: python -m recipes.doctor"""

if not __package__:  # run by path: this folder comes first, and its inspect.py would hide the standard library's
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(abspath(__file__)))

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("doctor", writes=False)
def main(cfg: DictConfig) -> int:
    from recipes.commands.patterns import examine, keys_of, show
    from recipes.support.config import checked
    from recipes.support.launch import launch

    keys = keys_of(cfg)
    result = launch(examine, checked(cfg) | {"doctor": {"steps": keys.steps}})
    return 0 if result is None else show(result, as_json=keys.json)


if __name__ == "__main__":
    main()
