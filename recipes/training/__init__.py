"""The runs: a small GPT on text over each layout of ranks, alone (`training`), or with rollouts that get its weights (`syncing`)."""
