"""The work behind the commands that look at checkpoints or rewrite them: inspect, verify, plan, doctor, convert."""
