"""python -m recipes.train: train, save checkpoints, resume."""

if not __package__:  # run by path: sys.path[0] is this folder, whose inspect.py would hide the standard library's
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("train")
def main(cfg: DictConfig) -> float | None:
    from recipes.support.config import checked
    from recipes.support.launch import launch
    from recipes.support.ranks import num_existing
    from recipes.support.run_folder import RunFolder
    from recipes.training.training import settle_start, train

    summary = launch(train, checked(cfg, num_ranks=num_existing()), RunFolder(cfg, settle_start))
    return summary["losses"][-1] if summary and summary["losses"] else None  # what a sweeper of hparams_search= makes small


if __name__ == "__main__":
    main()
