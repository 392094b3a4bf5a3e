"""What every command needs: Hydra's door, the checks of a config, ranks and their launcher, the folder of a run, and what it reports."""
