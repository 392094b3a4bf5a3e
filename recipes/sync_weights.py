"""python -m recipes.sync_weights: train, and send the weights to rollouts after every step."""

if not __package__:  # run by path: sys.path[0] is this folder, whose inspect.py would hide the standard library's
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("sync_weights")
def main(cfg: DictConfig) -> None:
    from recipes.support.launch import launch
    from recipes.support.run_folder import RunFolder
    from recipes.training.sync_config import checked_sync
    from recipes.training.syncing import settle_sync, sync_weights

    launch(sync_weights, checked_sync(cfg), RunFolder(cfg, settle_sync))


if __name__ == "__main__":
    main()
