"""Simulate a GPU, so that a machine without one finds what a GPU would refuse.

Within `with FakeCuda() as gpu:` a tensor on "cuda" is a plain tensor of the CPU with a mark on its
storage. It says that it is on cuda:0, and what CUDA refuses raises an error as CUDA does:

    with FakeCuda() as gpu:
        x = torch.rand(3, device="cuda")     x.device is cuda:0
        x + torch.rand(3)                    RuntimeError: … found at least two devices
        x.numpy()                            TypeError: can't convert cuda:0 …
        gpu.counts                           {"launches": 1}

A view shares its tensor's storage, and autograd sees plain tensors. So views, in-place operations,
parameters and gradients need no care. Two modes of torch see everything else:

    Functions    what Python asks for: device=…, x.to(), x.device, x.tolist(), generators
    Operations   what torch makes of it: devices are checked, results marked, launches counted

The driver is never asked, since it may be missing, or be that of a real GPU. In every build torch
takes the ways of its build for CUDA. A function of the driver raises an error, except for the few
that are simulated.

These are counted, so that a test sees whether the GPU was used:

    launches     operations on the GPU that are no views, and replays
    replays      replays of captured graphs

While a graph is captured, Python must not wait for numbers of the GPU, and nothing may be copied
between it and the CPU. Python waits in item, tolist and nonzero, and for a mask as an index.

Left out:
    several GPUs, streams, memory, speed
    errors that a kernel finds, such as an index out of range
    what C++ decides by the device: torch takes the CPU's way there, as in optimizers
"""
import functools
from collections import Counter
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # kernels that call other operations
FROM_LISTS = {torch.tensor, torch.as_tensor, Tensor.new_tensor}
# Operations whose result, or its size, Python has to know before it goes on: their names in ATen
WAITING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "bincount",
           "unique_dim", "unique_consecutive", "repeat_interleave", "is_nonzero"}
DRIVER = "_cuda_", "_accelerator_"  # how the names of the driver's functions begin
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


def on_gpu(x: Tensor) -> bool:
    """Say whether a tensor has the mark."""
    return getattr(x.untyped_storage(), "on_gpu", False)


def mark(x: Tensor, gpu: bool) -> Tensor:
    x.untyped_storage().on_gpu = gpu
    return x


def is_gpu(device) -> bool:
    return torch.device(device).type == "cuda"


def tensors_in(*values) -> list[Tensor]:
    """Find the tensors among arguments, lists of them, and keyword arguments."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


@functools.cache
def is_composite(operation: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation, COMPOSITE)


def parse_to(*args, parse=torch._C._nn._parse_to, **kwargs) -> tuple:
    """Find the device and the type that arguments of `to` ask for; a tensor asks for its own."""
    if args and isinstance(args[0], Tensor):
        args = (CUDA if on_gpu(args[0]) else CPU, args[0].dtype, *args[1:])
    return parse(*args, **kwargs)


def refuse(name: str, *_, **__) -> None:
    """Take the place of a function that would ask the driver."""
    raise RuntimeError(f"cuda: the simulated GPU has no {name}")


class FakeGenerator(torch.Generator):
    """Generate a CPU's numbers on any device; `device` is what was asked for."""

    def __new__(cls, device="cpu"):
        self = super().__new__(cls, "cpu")
        self.asked = CUDA if is_gpu(device) else CPU
        return self

    device = property(lambda self: self.asked)


class FakeCuda:
    """Take the place of a GPU as long as its `with` lasts.

    counts   launches and replays so far
    inside   whether the function that Python called last makes tensors of the GPU. None: there is
             no such function
    quiet    whether operations are this file's own, which are neither checked nor counted
    tape     the operations of a CUDA graph while it is captured, else None
    """

    def __init__(self):
        self.counts, self.inside, self.quiet, self.tape = Counter(), None, False, None

    def __enter__(self):
        autocast = torch.autocast
        stream = SimpleNamespace(is_capturing=lambda: self.tape is not None)
        asked = {x: functools.partial(refuse, x) for x in dir(torch._C) if x.startswith(DRIVER)}
        asked |= dict(_accelerator_getAccelerator=lambda: torch.device("cuda"),
                      _accelerator_getDeviceIndex=lambda: 0,
                      _accelerator_getStream=lambda _: stream,
                      _accelerator_synchronizeDevice=lambda _: self.wait())
        patches = [
            (torch._C, asked),
            (torch, dict(Generator=FakeGenerator, autocast=lambda device_type, *args, **options:
                         autocast("cpu", *args, **options))),
            (torch.cuda, dict(is_available=lambda: True, device_count=lambda: 1,
                              synchronize=lambda *_: self.wait(),
                              get_rng_state=lambda *_: torch.get_rng_state(),
                              set_rng_state=lambda *_: None,
                              CUDAGraph=functools.partial(FakeGraph, self),
                              graph=lambda graph: self.set(tape=graph.tape),
                              _lazy_init=functools.partial(refuse, "driver"),
                              # The optimizers of torch 2.11 ask this.
                              is_current_stream_capturing=stream.is_capturing)),
            (torch._C._nn, dict(_parse_to=parse_to))]
        self.stack = ExitStack()
        for module, names in patches:
            self.stack.enter_context(patch.multiple(module, **names))
        self.stack.enter_context(Operations(self))
        self.stack.enter_context(Functions(self))
        return self

    def __exit__(self, *error):
        self.stack.close()

    @contextmanager
    def set(self, **state):
        """Set attributes for a while."""
        before = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        try:
            yield
        finally:
            vars(self).update(before)

    def wait(self) -> None:
        """Refuse to wait in a capture, which has nothing to wait for: nothing runs in it."""
        if self.tape is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def move(self, x: Tensor, gpu: bool) -> Tensor:
        """Return x where it is wanted, or a copy of it there."""
        if on_gpu(x) == gpu:
            return x
        self.wait()
        with self.set(quiet=True):
            return mark(x.clone(), gpu)


class FakeGraph:
    """Take the place of torch.cuda.CUDAGraph.

    A replay runs the captured operations again, on the tensors that were captured. It does not run
    the function, so a replay never sees what changed elsewhere.
    """

    def __init__(self, gpu: FakeCuda):
        self.gpu, self.tape = gpu, []

    def replay(self) -> None:
        self.gpu.counts["launches"] += 1
        self.gpu.counts["replays"] += 1
        with self.gpu.set(quiet=True):
            for operation, args, options, results in self.tape:
                for old, x in zip(tensors_in(results), tensors_in(operation(*args, **options))):
                    if old.data_ptr() != x.data_ptr():
                        old.copy_(x)


class Functions(TorchFunctionMode):
    """Give a GPU's answer where Python calls a function or asks a tensor for an attribute."""

    def __init__(self, gpu: FakeCuda):
        super().__init__()
        self.gpu = gpu
        self.own = {Tensor.device.__get__: lambda x: CUDA if on_gpu(x) else x.device,
                    Tensor.is_cuda.__get__: on_gpu, Tensor.to: self.to, Tensor.tolist: self.tolist,
                    Tensor.cpu: lambda x: gpu.move(x, False), Tensor.numpy: self.numpy,
                    Tensor.is_cpu.__get__: lambda x: not on_gpu(x),
                    torch._C._nn.one_hot: self.one_hot}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in self.own:
            return self.own[function](*args, **kwargs)
        device, generator = kwargs.get("device"), kwargs.get("generator")
        gpu = any(map(on_gpu, tensors_in(args, kwargs))) if device is None else is_gpu(device)
        if generator is not None and is_gpu(generator.device) != gpu:
            raise RuntimeError(f"Expected a '{'cuda' if gpu else 'cpu'}' device type for generator "
                               f"but found '{generator.device.type}'")
        if device is not None and is_gpu(device):
            kwargs["device"] = CPU
        if function in FROM_LISTS and device is not None:
            return self.gpu.move(function(*args, **kwargs), gpu)
        with self.gpu.set(inside=gpu):
            out = function(*args, **kwargs)
        return mark(out, gpu) if function is Tensor.__deepcopy__ else out

    def to(self, x, *args, copy=False, **kwargs):
        device, dtype, *_ = parse_to(*args, **kwargs)
        out = x if device is None else self.gpu.move(x, is_gpu(device))
        with self.gpu.set(inside=on_gpu(out)):
            return out.to(dtype or out.dtype, copy=copy and out is x)

    def tolist(self, x):
        if on_gpu(x):
            self.gpu.wait()
        return x.tolist()

    def numpy(self, x, *args, **kwargs):
        if on_gpu(x):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        return x.numpy(*args, **kwargs)

    def one_hot(self, x, classes=-1):
        """Do what CUDA does: a CPU would look at the largest index first."""
        with self.gpu.set(quiet=True):
            return mark(torch.nn.functional.one_hot(x, classes), on_gpu(x))


class Operations(TorchDispatchMode):
    """Check, count and record the operations that functions are made of; mark their results."""

    def __init__(self, gpu: FakeCuda):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        gpu, kwargs = self.gpu, kwargs or {}
        if gpu.quiet:
            return operation(*args, **kwargs)
        if is_composite(operation.name()):  # inference mode hands these over whole
            with self:
                return operation._op_dk(COMPOSITE, *args, **kwargs)
        name, given = operation._schema.name.removeprefix("aten::"), tensors_in(args, kwargs)
        there = [x for x in given if on_gpu(x)]
        if there:
            self.check(operation, name, args, given)
            if self.must_wait(name, args):
                gpu.wait()
        out = operation(*args, **kwargs)
        made_there = bool(there)
        if gpu.inside is not None and ("device" in kwargs or not given):
            made_there = gpu.inside
        if made_there or there:
            gpu.counts["launches"] += not operation.is_view
            if not operation.is_view and not operation._schema.is_mutable:
                for x in tensors_in(out):
                    mark(x, made_there)
            if gpu.tape is not None:
                gpu.tape.append((operation, args, kwargs, out))
        return out

    def check(self, operation, name: str, args, given: list[Tensor]) -> None:
        """Refuse an operation on tensors of both devices, unless CUDA takes those of the CPU.

        CUDA takes them in a copy and as indices. It takes a single number, a tensor without
        dimensions, in operations that work on each number alone.
        """
        here = [x for x in given if not on_gpu(x)]
        if name in INDEXING and not on_gpu(args[0]):
            raise RuntimeError("indices should be either on cpu or on the same device as the "
                               "indexed tensor (cpu)")
        if name in INDEXING:
            here = [x for x in tensors_in(args[2:]) if not on_gpu(x)]
        elif name in ("copy_", "_foreach_copy_", "_has_compatible_shallow_copy_type"):
            here = []
        single = name in INDEXING or name == "fill_" or name.startswith("_foreach") or (
            torch.Tag.pointwise in operation.tags)
        if any(x.ndim > 0 or not single for x in here):
            raise RuntimeError("Expected all tensors to be on the same device, but found at least "
                               f"two devices, cuda:0 and cpu! (in {name})")

    def must_wait(self, name: str, args) -> bool:
        """Say whether Python waits for the result of an operation, or for a copy in it."""
        if name == "copy_":
            return on_gpu(args[0]) != on_gpu(args[1])
        if name not in INDEXING:
            return name in WAITING
        indices = tensors_in(args[1])
        fills = name != "index" and args[2].numel() == 1 and not on_gpu(args[2])
        masks = any(x.dtype == torch.bool for x in indices) and not fills
        return masks or not all(map(on_gpu, indices))
