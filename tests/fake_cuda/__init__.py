"""A CUDA device that is none: tensors with device "cuda" in host memory, streams in slow motion, recorded graphs.

The parts of torch above its CUDA kernels run for real: dispatcher, autograd with its streams, optimizers, autocast,
`torch.cuda.graph`. Below them every kernel of the "CUDA" key is replaced by one that queues the CPU's kernel on the
current stream. Queued work runs when the host waits, in any order that the streams and events allow, so a wait that
is missing shows as garbage: memory holds NaN until a kernel has written to it, and again once it was freed.

| file | what it stands for |
|---|---|
| `memory.py` | the caching allocator: blocks, pools of graphs, what a freed block looks like, where memory ends |
| `host_memory.py` | that of page-locked memory |
| `streams.py` | streams, events and the order in which work runs |
| `kernels.py` | the kernels, and which of them make the host wait |
| `graphs.py` | capture: what it forbids, how it fails, what a failure leaves behind, replay |
| `autograd.py`, `contexts.py` | what torch's engine needs to run backward passes without a device |
| `random_numbers.py` | the generators of the devices, outside and inside graphs |
| `device.py`, `fixtures.py` | all of it in the place of `torch.cuda`, for a test |
| `run.py`, `python` | the same for a program, all of `make gpu` for instance, with Triton's kernels compiled |
| `left_out.py` | tests for a device that the fake cannot run, and why |

What it does not model: kernels that only CUDA has (cuDNN, Triton), fragmented memory, time, and more than one
process. Where a release of torch differs from another, `FakeCuda(release=...)` chooses.
"""

from .device import FakeCuda
from .fixtures import fake_cuda, has_device, rehearse

__all__ = ["FakeCuda", "fake_cuda", "has_device", "rehearse"]
