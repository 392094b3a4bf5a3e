"""The runs: a model in each layout of ranks, alone (`training`) or with rollouts that get its weights (`syncing`).

model, data     what is asked of a model and of data
gpt, text       a small GPT, and text
schedule        its learning rate
callbacks       what looks at each step
parallel/       layouts of the model over ranks
training        the run of `recipes.train`
restored        which keys of a resumed run come from its checkpoint, which from the command line
roles           trainers and rollouts: numbers, engines, the rollout's model
sync_config     keys of the weight sync, and their checks
syncing         the run of `recipes.sync_weights`
facts           the facts of a run for rollouts that join
joining         the rollout of `recipes.join_rollout`
"""
