"""Weights from trainers to rollouts: published, received, versioned and verified, on all ranks or on none.

Files, in the order in which data travels:

    base                    the contract of an engine, and the registry
    export                  whole weights of a model on any layout
    members, engine_thread  the ranks of an engine, and the thread that speaks for one
    offload                 the weights of a trainer, on its host
    update, agreed          one update, what carries it and what takes it; what ranks agree on before it
    versioned               the engine: members, pools, and the update as one function
    broadcast, kimi, parameter_server, naive    the transports, and the engine with each
    wire/                   how weights travel
    stream, live            what a rollout receives; its model, changed as a whole
    elastic/                rollouts that come and go
    inference/              the worker processes of an inference engine
    verl_plugin             the engines in verl's registry
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
from ckpt.engine.export import WholeWeights
from ckpt.engine.live import LiveModel
from ckpt.engine.naive import NaiveCheckpointEngine

__all__ = [
    "BroadcastCheckpointEngine",
    "CheckpointEngine",
    "CheckpointEngineRegistry",
    "CheckpointEngineWithCache",
    "ElasticEngine",
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
