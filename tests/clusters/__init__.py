"""Tests on the engines of clusters, started here: the daemons of Slurm, nodes of Ray, agents of torchrun. `.ci/clusters` installs them."""
