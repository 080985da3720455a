// Blocks of four warps, as masks.cu and variance.cu have them.
#pragma once

#include "cuda/warp.h"

namespace gact {

constexpr int kWarpLanes = 32;
constexpr int kBlockWarps = 4;
constexpr int kBlockThreads = kBlockWarps * kWarpLanes;

GACT_FN u32 lane_id() { return thread_of_block() % kWarpLanes; }

GACT_FN i64 warp_of_grid() { return static_cast<i64>(block_of_grid()) * kBlockWarps + thread_of_block() / kWarpLanes; }

}  // namespace gact
