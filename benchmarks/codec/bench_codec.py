"""How fast is the codec beside a plain copy of the same tensor?

Kernel to kernel: pack and unpack, with groups in memory order and by column, against copy_ into a tensor that exists
already. API: codec.pack and codec.unpack against clone, which allocates its result as they do. Beside them torch's own
4-bit operators, which round to nearest. What is compared runs in turns, so that a change of the machine's speed meets
both; medians are reported. --isa chooses among the kernels that the processor can run.

With --device cuda: pack_out and unpack_out against copy_ on the device, timed by CUDA events, as bytes moved per second
(pack reads the tensor and writes the payload) over those of the copy in the same run.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gact_dist import codec
from gact_dist.codec import nvrtc, ops

GROUP_SIZE = codec.DEFAULT_GROUP_SIZE
COLUMNS = 768
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Times:
    """Seconds of each action: the median, and the shortest, which neighbours on the machine disturb least."""

    median_s: dict[str, float]
    shortest_s: dict[str, float]

    def ratio(self, action: str, yardsticks: tuple[str, str], shortest: bool = False) -> float:
        """Time of ``action`` over the mean time of ``yardsticks``."""
        times_s = self.shortest_s if shortest else self.median_s
        return times_s[action] / statistics.mean(times_s[name] for name in yardsticks)


def measure_times(actions: dict[str, Callable[[], object]], rounds: int) -> Times:
    """Run all actions once in each of ``rounds`` rounds, after two rounds to warm up."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 2):
        for name, action in actions.items():
            start_s = time.perf_counter()
            result = action()
            elapsed_s = time.perf_counter() - start_s
            del result
            if number >= 2:
                times[name].append(elapsed_s)
    medians_s = {name: statistics.median(values) for name, values in times.items()}
    return Times(medians_s, {name: min(values) for name, values in times.items()})


def kernel_actions(x: Tensor, bits: int, group_size: int) -> dict[str, Callable[[], object]]:
    """copy_, pack and unpack of the flat tensor ``x`` with an output that exists already."""
    target = torch.empty_like(x)
    buffer = ops.pack(x, bits, group_size, 1)
    return {
        "copy_": lambda: target.copy_(x),
        "pack": lambda: ops.pack_out(x, bits, group_size, 1, buffer),
        "copy_ again": lambda: target.copy_(x),
        "unpack": lambda: ops.unpack_out(buffer, bits, group_size, x.numel(), x.dtype, 1, target),
    }


def column_actions(x: Tensor, bits: int, group_size: int) -> dict[str, Callable[[], object]]:
    """The kernels for groups of one column."""
    target = torch.empty_like(x)
    buffer = ops.pack(x, bits, group_size, 1, COLUMNS)
    return {
        "pack by column": lambda: ops.pack_out(x, bits, group_size, 1, buffer, COLUMNS),
        "unpack by column": lambda: ops.unpack_out(buffer, bits, group_size, x.numel(), x.dtype, 1, target, COLUMNS),
    }


def api_actions(x: Tensor, bits: int) -> dict[str, Callable[[], object]]:
    """clone, codec.pack and codec.unpack of ``x``; each allocates its result."""
    packed = codec.pack(x, bits, seed=1)
    return {
        "clone": x.clone,
        "codec.pack": lambda: codec.pack(x, bits, seed=1),
        "clone again": x.clone,
        "codec.unpack": lambda: codec.unpack(packed),
    }


def torch_actions(x: Tensor) -> dict[str, Callable[[], object]]:
    """torch's 4-bit row-wise quantisation, rounding to nearest, of ``x`` [rows, GROUP_SIZE] beside ours."""
    rows = x.view(-1, GROUP_SIZE)
    prepacked = torch.ops.quantized.embedding_bag_4bit_prepack(rows)
    ours = codec.pack(x, 4, seed=1)
    return {
        "torch 4-bit pack": lambda: torch.ops.quantized.embedding_bag_4bit_prepack(rows),
        "codec.pack": lambda: codec.pack(x, 4, seed=1),
        "torch 4-bit unpack": lambda: torch.ops.quantized.embedding_bag_4bit_unpack(prepacked),
        "codec.unpack": lambda: codec.unpack(ours),
    }


def measure(tensor_bytes: int, rounds: int, bit_widths: list[int], group_size: int) -> list[dict]:
    """One row for each dtype and width, times in seconds and ratios to the copy."""
    rows = []
    for name, dtype in DTYPES.items():
        rows_of_x = tensor_bytes // dtype.itemsize // COLUMNS
        x = torch.randn(rows_of_x * COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)
        for bits in bit_widths:
            actions = kernel_actions(x, bits, group_size) | column_actions(x, bits, group_size)
            kernel = measure_times(actions, rounds)
            api = measure_times(api_actions(x, bits), rounds)
            rows.append({"dtype": name, "bits": bits} | ratios(kernel, api) | times_of(kernel, api))
    return rows


def ratios(kernel: Times, api: Times) -> dict[str, float]:
    """Times over that of the copy; from medians, and from the shortest times."""
    copies, clones = ("copy_", "copy_ again"), ("clone", "clone again")
    return {
        "pack_to_copy": kernel.ratio("pack", copies),
        "unpack_to_copy": kernel.ratio("unpack", copies),
        "pack_by_column_to_copy": kernel.ratio("pack by column", copies),
        "unpack_by_column_to_copy": kernel.ratio("unpack by column", copies),
        "codec_pack_to_clone": api.ratio("codec.pack", clones),
        "codec_unpack_to_clone": api.ratio("codec.unpack", clones),
        "pack_to_copy_shortest": kernel.ratio("pack", copies, shortest=True),
        "unpack_to_copy_shortest": kernel.ratio("unpack", copies, shortest=True),
        "pack_by_column_to_copy_shortest": kernel.ratio("pack by column", copies, shortest=True),
        "unpack_by_column_to_copy_shortest": kernel.ratio("unpack by column", copies, shortest=True),
    }


def times_of(kernel: Times, api: Times) -> dict[str, dict[str, float]]:
    """The seconds behind the ratios."""
    return {"median_s": kernel.median_s | api.median_s, "shortest_s": kernel.shortest_s | api.shortest_s}


DEVICE_ACTIONS = ("pack", "unpack", "pack by column", "unpack by column")


def name_in_json(action: str) -> str:
    """An action as part of a key."""
    return action.replace(" ", "_")


# Long enough for the host to queue a whole round, so that no event waits for a launch.
HEAD_START_CYCLES = 8_000_000
# Read before each action: several times a GPU's cache, so that none pays for lines that the one before it has written.
CACHE_BYTES = 256 << 20


def measure_device_times(actions: dict[str, Callable[[], object]], rounds: int) -> Times:
    """As measure_times, in seconds of the device between two events; the cache holds nothing of an action."""
    elsewhere = torch.ones(CACHE_BYTES // 4, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 2):
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in actions}
        torch.cuda._sleep(HEAD_START_CYCLES)
        for name, action in actions.items():
            elsewhere.sum()
            events[name][0].record()
            action()
            events[name][1].record()
        torch.cuda.synchronize()
        if number >= 2:
            for name, (start, end) in events.items():
                times[name].append(start.elapsed_time(end) / 1e3)
    medians_s = {name: statistics.median(values) for name, values in times.items()}
    return Times(medians_s, {name: min(values) for name, values in times.items()})


def measure_device(mebibytes: list[int], rounds: int, bit_widths: list[int]) -> list[dict]:
    """One row for each size, dtype and width: seconds, bytes per second, and those over the copy's."""
    rows = []
    for size in mebibytes:
        for name, dtype in DTYPES.items():
            numel = (size << 20) // dtype.itemsize // COLUMNS * COLUMNS
            x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype).cuda()
            for bits in bit_widths:
                actions = kernel_actions(x, bits, GROUP_SIZE) | column_actions(x, bits, GROUP_SIZE)
                times = measure_device_times(actions, rounds)
                moved_bytes = x.nbytes + ops.pack(x, bits, GROUP_SIZE, 1).nbytes
                copy_s = statistics.mean(times.median_s[copy] for copy in ("copy_", "copy_ again"))
                speeds = {name_in_json(action): moved_bytes / times.median_s[action] for action in DEVICE_ACTIONS}
                copy_speed = 2 * x.nbytes / copy_s
                row = {"mebibytes": size, "dtype": name, "bits": bits, "copy_bytes_per_s": copy_speed}
                row |= {f"{action}_bytes_per_s": speed for action, speed in speeds.items()}
                row |= {f"{action}_to_copy": speed / copy_speed for action, speed in speeds.items()}
                rows.append(row | {"median_s": times.median_s, "shortest_s": times.shortest_s})
    return rows


def device_environment() -> dict:
    """GPU, versions and date."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvrtc": ".".join(map(str, nvrtc.find_nvrtc().version())),
    }


def print_device_table(rows: list[dict]) -> None:
    """One line for each size, dtype and width: TB/s, and the share of the copy's."""
    names = " | ".join(f"{action}: TB/s, to copy" for action in DEVICE_ACTIONS)
    print(f"MiB  dtype     bits  copy TB/s | {names}")
    for row in rows:
        cells = [
            f"{row[f'{key}_bytes_per_s'] / 1e12:{len(action) + 7}.2f} {row[f'{key}_to_copy']:7.2f}"
            for action, key in ((action, name_in_json(action)) for action in DEVICE_ACTIONS)
        ]
        head = f"{row['mebibytes']:4} {row['dtype']:9} {row['bits']:4} {row['copy_bytes_per_s'] / 1e12:10.2f}"
        print(f"{head} | {' | '.join(cells)}")


def environment() -> dict:
    """Hardware, versions and date."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": facts.get("model name", platform.processor()),
        "family_model": f"{facts.get('cpu family')}/{facts.get('model')}",
        "threads": torch.get_num_threads(),
        "isa": ops.isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def print_table(rows: list[dict]) -> None:
    """One line for each dtype and width: milliseconds of the copy, then ratios."""
    print("to copy_:                 memory order | by column    | the same of the shortest times | to clone")
    print("dtype     bits  copy_ ms |  pack unpack |  pack unpack |  pack unpack |  pack unpack | codec pack unpack")
    for row in rows:
        print(
            f"{row['dtype']:9} {row['bits']:4} {1e3 * row['median_s']['copy_']:9.1f} |"
            f" {row['pack_to_copy']:5.2f} {row['unpack_to_copy']:6.2f} |"
            f" {row['pack_by_column_to_copy']:5.2f} {row['unpack_by_column_to_copy']:6.2f} |"
            f" {row['pack_to_copy_shortest']:5.2f} {row['unpack_to_copy_shortest']:6.2f} |"
            f" {row['pack_by_column_to_copy_shortest']:5.2f} {row['unpack_by_column_to_copy_shortest']:6.2f} |"
            f" {row['codec_pack_to_clone']:10.2f} {row['codec_unpack_to_clone']:7.2f}"
        )


def run_on_cpu(mebibytes: int, rounds: int, bit_widths: list[int], group_size: int) -> dict:
    """Measure and print a table; returns what goes into the JSON file."""
    tensor_bytes = mebibytes << 20
    rows = measure(tensor_bytes, rounds, bit_widths, group_size)
    x = torch.randn(tensor_bytes // 4, generator=torch.Generator().manual_seed(0))
    beside_torch_s = measure_times(torch_actions(x), max(3, rounds // 3)).median_s
    print_table(rows)
    print("float32, 4 bits, ms:", {name: round(1e3 * value, 1) for name, value in beside_torch_s.items()})
    result = {"environment": environment(), "tensor_bytes": tensor_bytes, "group_size": group_size, "columns": COLUMNS}
    return result | {"rows": rows, "float32_4_bits_beside_torch_s": beside_torch_s}


def run_on_device(mebibytes: list[int], rounds: int, bit_widths: list[int]) -> dict:
    """Measure and print a table; returns what goes into the JSON file."""
    if not torch.cuda.is_available():
        raise SystemExit("bench_codec: there is no CUDA device; leave out --device cuda")
    rows = measure_device(mebibytes, rounds, bit_widths)
    print_device_table(rows)
    return {"environment": device_environment(), "group_size": GROUP_SIZE, "rows": rows}


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--mebibytes", type=int, nargs="+", help="sizes of the tensor: 256; cuda: 64 256")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE, help="of the CPU's kernels")
    parser.add_argument("--isa", choices=ops.available_isas(), default=ops.isa(), help="the CPU's kernels")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and len(arguments.mebibytes or []) > 1:
        parser.error(f"--mebibytes has {len(arguments.mebibytes)} sizes, expected one without --device cuda")
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda":
        result = run_on_device(arguments.mebibytes or [64, 256], arguments.rounds, arguments.bits)
    else:
        if arguments.isa != ops.isa():
            ops.set_isa(arguments.isa)
        size = (arguments.mebibytes or [256])[0]
        result = run_on_cpu(size, arguments.rounds, arguments.bits, arguments.group_size)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
