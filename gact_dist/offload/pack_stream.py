"""Packing on a stream of its own, beside the stream that computes.

[Note: packing beside] The stream waits for what the computing stream has queued, which makes the tensor, and reads it
there. The allocator must not hand the tensor's memory on before it has been read, nor the payload's, which was
allocated on this stream, before the computing stream has read that: record_stream says both. Its price is that the
tensor's memory is free again only when the host sees that the packing is over. Whoever reads a payload lets its own
stream wait first: codec.unpack() calls Packed.ready. A tensor that is modified in place while it is being packed is no
matter, as its backward raises; one that is modified behind autograd's back, through `.data`, would be packed wrongly.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from .device import CudaDevice, Device
from .manager import device_of

_Result = TypeVar("_Result")


class PackStream:
    """Runs what packs tensors on the pack stream of one device. See [Note: packing beside]."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device: a model may have some on the host."""
        return tensor.device == self._device.device

    def run(
        self, tensor: Tensor, pack: Callable[[], _Result], payload_of: Callable[[_Result], Tensor]
    ) -> tuple[_Result, Callable[[], None]]:
        """(what pack() makes of a tensor, a function that lets the current stream wait until it is there).

        payload_of: the memory of the result. Raises RuntimeError while a CUDA graph is captured.
        """
        device, stream = self._device, self._device.pack_stream
        if device.is_capturing():
            raise RuntimeError(
                "a tensor was to be packed on a stream of its own while a CUDA graph is captured, expected pack_stream "
                "false there: capture without gact_dist, or leave the model's forward out of the capture"
            )
        computing = device.current_stream()
        device.wait(stream, device.record(computing))
        with device.on(stream):
            packed = pack()
        done = device.record(stream)
        device.hand_over(tensor, computing, stream)
        device.hand_over(payload_of(packed), stream, computing)
        return packed, lambda: device.wait(device.current_stream(), done)


def open_pack_stream(model: nn.Module) -> PackStream:
    """For the model's CUDA device, or else the current one. Raises ValueError without one."""
    if not torch.cuda.is_available():
        raise ValueError(
            "pack_stream is true and torch finds no CUDA device, expected one that has streams: leave it false"
        )
    return PackStream(CudaDevice(device_of(model) or torch.device("cuda", torch.cuda.current_device())))
