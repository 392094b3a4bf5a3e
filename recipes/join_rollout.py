"""python -m recipes.join_rollout run=<folder of the run>: join a running weight sync as one more rollout."""

if not __package__:  # run by path: sys.path[0] is this folder, whose inspect.py would hide the standard library's
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("join_rollout", writes=False)
def main(cfg: DictConfig) -> None:
    from recipes.training.joining import join_rollout
    from recipes.training.sync_config import checked_join

    join_rollout(checked_join(cfg))


if __name__ == "__main__":
    main()
