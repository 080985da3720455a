"""What a job puts around its model (data parallelism, sharding, pipelines), and every collective of the package."""

from .bypass import PeerFailedError, bypassed, gathered, gathered_in_turn
from .collectives import (
    PlanMismatchError,
    all_ranks,
    check_agreement,
    data_parallel_groups,
    max_over_groups,
    mean_of_positive,
    raises_on_all,
    rank,
    reduce_over,
    world_size,
)
from .pipeline import learning_shapes
from .tensor_parallel import TENSOR_PARALLELISM, distributed_again, local_part, own_part, tensor_parallel_groups
from .wrappers import (
    checkpoint_files,
    checkpoint_savers,
    checkpoints_as,
    checkpoints_offering_inputs,
    forwarding_nodes,
    operator_aliases,
    plumbing,
    sharding,
    units,
    unwrap,
    user_path,
)

__all__ = [
    "TENSOR_PARALLELISM",
    "PeerFailedError",
    "PlanMismatchError",
    "all_ranks",
    "bypassed",
    "check_agreement",
    "checkpoint_files",
    "checkpoint_savers",
    "checkpoints_as",
    "checkpoints_offering_inputs",
    "data_parallel_groups",
    "distributed_again",
    "forwarding_nodes",
    "gathered",
    "gathered_in_turn",
    "learning_shapes",
    "local_part",
    "max_over_groups",
    "mean_of_positive",
    "operator_aliases",
    "own_part",
    "plumbing",
    "raises_on_all",
    "rank",
    "reduce_over",
    "sharding",
    "tensor_parallel_groups",
    "units",
    "unwrap",
    "user_path",
    "world_size",
]
