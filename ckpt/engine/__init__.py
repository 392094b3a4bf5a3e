"""Weight sync: trainers publish, rollouts receive; versioned, verified, all or nothing."""

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
