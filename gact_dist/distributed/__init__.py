"""What a job puts around its model (data parallelism, sharding, pipelines), and every collective of the package."""

from .collectives import (
    PlanMismatchError,
    check_agreement,
    data_parallel_group,
    everywhere,
    maximum_over,
    mean_of_positive,
    rank,
    reduce_over,
    world_size,
)
from .pipeline import learning_shapes
from .wrappers import (
    bypassed,
    distributed_again,
    local_part,
    own_part,
    sharding,
    tensor_parallel_groups,
    unwrap,
    user_path,
)

__all__ = [
    "PlanMismatchError", "bypassed", "check_agreement", "data_parallel_group", "distributed_again", "everywhere",
    "learning_shapes", "local_part", "maximum_over", "mean_of_positive", "own_part", "rank", "reduce_over", "sharding",
    "tensor_parallel_groups", "unwrap", "user_path", "world_size",
]  # fmt: skip
