"""Benchmarks beside peers and the machine's limits, in interleaved rounds: `python -m recipes.benchmark measure=...`.

    measure=     what                                         module                contenders
    saves        saves and loads                              saves_and_loads       contenders, peers, limits
    background   saves beside training steps                  background_saves      background_contenders
    tiers        loads from the memory of hosts               recoveries            limits
    sync         weight updates, trainers to rollouts         weight_updates        update_contenders, parameter_server
    megatron     our strategies and megatron-core's           megatron_strategies   megatron_peer (another process)
    convert      conversions between formats                  conversions
    device       copies between device and host               device_copies
    validation   validation levels and the doctor             validation_costs
    plan         the plan of a save of 10^12 parameters       plan_costs
    ranks        agreements of 4 to 16,384 ranks              agreements            reckoned_agreements
    compare      nothing: ratios of two results               comparison

`harness` runs them all: it checks keys, lets contenders take turns, and writes and shows the result. `measuring` takes time and
memory; `tables` makes medians, ratios, tables and the plot. States: `workloads` (a training state, with the `places` of its bytes),
`adapters` (a fine-tune by PEFT), `weights`, `megatron_state`.
`training_step` trains; `slow_store` plays a network file system, and `host_memory` several hosts.
"""
