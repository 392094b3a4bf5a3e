"""Weight sync from trainers to rollouts: published, received, versioned and verified, on all ranks or on none.

Files, in the order in which data travels:

    base                    the contract of an engine, and the registry
    export                  whole weights of a model on any layout
    members                 the ranks of an engine; the thread that makes its collective calls
    offload                 a trainer's weights, copied to its host
    update, agreed          one update, and the interfaces Transport and Sink; the checks of all ranks before it
    versioned               the engine: members, pools, and the update as one function
    broadcast, kimi, parameter_server, naive    the transports, and the engine of each
    wire/                   the transfer of weights
    stream, live_model      the iterator that a rollout receives; a model whose weights change all at once
    elastic/                rollouts that join and leave during a run
    inference/              the worker processes of an inference engine
    verl_plugin             the engines in verl's registry
    nemo_rl_plugin          an engine as a refit transport of NeMo-RL
"""

from ckpt.engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    CheckpointEngineWithCache,
    MasterMetadata,
    SyncReport,
    WeightVersion,
)
from ckpt.engine.broadcast import BroadcastCheckpointEngine
from ckpt.engine.elastic.elastic import ElasticEngine
from ckpt.engine.export import AdapterWeights, HuggingFaceWeights, WholeWeights
from ckpt.engine.live_model import LiveModel
from ckpt.engine.naive import NaiveCheckpointEngine

__all__ = [
    "AdapterWeights",
    "BroadcastCheckpointEngine",
    "CheckpointEngine",
    "CheckpointEngineRegistry",
    "CheckpointEngineWithCache",
    "ElasticEngine",
    "HuggingFaceWeights",
    "LiveModel",
    "MasterMetadata",
    "NaiveCheckpointEngine",
    "SyncReport",
    "WeightVersion",
    "WholeWeights",
]

try:
    from ckpt.engine.kimi import KimiCheckpointEngine
except ImportError as _error:
    CheckpointEngineRegistry.record_import_error("kimi_ckpt_engine", _error)
else:
    __all__ += ["KimiCheckpointEngine"]
