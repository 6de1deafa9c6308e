"""Several processes, threads and shards: each a single one here, which takes the same code."""

import copy
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fused_mlp import FusedMLP, explain, fuse, machine, onednn, plan, unfuse, use_path

from .models import HIDDEN, WIDTH, Llama, adopted, own

if not dist.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)

# As large as the plan gives to the package's own autograd node.
TOKENS = plan.AUTOGRAD_BELOW // WIDTH + 1
LARGE = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)) / 16


@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def assert_close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(LARGE).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [own, adopted])
@pytest.mark.parametrize("each", [True, False], ids=["each mlp", "the whole"])
def test_fully_shard(make, each, mesh):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(make(), make())
    twin = copy.deepcopy(model)
    unfuse(twin)
    if each:
        for mlp in model:
            fully_shard(mlp, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert "a DTensor is not a plain tensor" in explain(model[0]), "between calls they are shards"
    with torch.no_grad(), use_path("onednn"):
        for _ in range(2):
            assert_close(model(LARGE), twin(LARGE))
    for m in (model, twin):
        train(m)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p.full_tensor(), q)
    with torch.no_grad(), use_path("onednn"):  # weights that were gathered anew
        for tokens in (8, TOKENS):
            assert_close(model(LARGE[:tokens]), twin(LARGE[:tokens]))


def test_unfuse_after_fully_shard(mesh):
    from torch.distributed.fsdp import FSDPModule, fully_shard

    module = Llama()
    x = torch.randn(3, HIDDEN)
    want = module(x)
    fuse(module)
    fully_shard(module, mesh=mesh)
    assert_close(module(x), want)
    module.up_proj.register_forward_hook(lambda *_: None)
    assert_close(module(x), want)
    assert unfuse(module) == [""]
    assert isinstance(module, FSDPModule)
    assert isinstance(module, Llama)
    assert not isinstance(module, FusedMLP)
    assert type(module).__name__ == "FSDPLlama"
    assert_close(module(x), want)


def test_fuse_after_fully_shard_keeps_the_original(mesh):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(Llama())
    want = model(LARGE)
    fully_shard(model, mesh=mesh)
    assert fuse(model) == []
    assert "0  original  gate_proj.weight is a DTensor" in explain(model)
    assert_close(model(LARGE), want)


@pytest.mark.parametrize("make", [own, adopted])
def test_distributed_data_parallel(make, mesh):
    model = nn.Sequential(make(), make())
    twin = copy.deepcopy(model)
    unfuse(twin)
    train(nn.parallel.DistributedDataParallel(model))
    train(twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p, q)


@pytest.mark.parametrize("make", [own, adopted])
def test_weights_and_inputs_that_are_dtensors(make, mesh):
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

    module = make()
    x = torch.randn(3, HIDDEN)
    want = module(x)
    distribute_module(module, mesh)
    got = module(distribute_tensor(x, mesh, [Replicate()]))
    assert_close(got.full_tensor(), want)
    got.sum().backward()
    assert all(type(p.grad) is type(p.data) for p in module.parameters())
    assert "a DTensor is not a plain tensor" in explain(module)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        module(x)


@pytest.mark.parametrize("first", [True, False], ids=["fused first", "sharded first"])
def test_tensor_parallel_inside_a_model(first, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = nn.Sequential(Llama())
    x = torch.randn(3, HIDDEN)
    want = model(x)
    shard = {
        "0.gate_proj": ColwiseParallel(),
        "0.up_proj": ColwiseParallel(),
        "0.down_proj": RowwiseParallel(),
    }
    if first:
        assert fuse(model) == ["0"]
    parallelize_module(model, mesh, shard)
    if not first:
        assert fuse(model) == []
    assert "0  original " in explain(model)
    got = model(x)
    assert_close(got, want)
    got.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def replica(module: nn.Module) -> nn.Module:
    """As `torch.nn.parallel.replicate` makes it, for whose use a second GPU is needed."""
    twin = module._replicate_for_data_parallel()
    for name, parameter in module._parameters.items():
        if parameter is None:
            twin._parameters[name] = None
        else:
            setattr(twin, name, parameter * 1)  # no leaf, no parameter
    for name, child in module._modules.items():
        twin._modules[name] = replica(child)
    return twin


@pytest.mark.parametrize("make", [own, adopted])
def test_data_parallel_replicas(make):
    module = make()
    module(LARGE[:5])
    for x in (LARGE[:5], LARGE):
        module.zero_grad()
        want = module(x)
        want.sum().backward()
        grad = module.up_proj.weight.grad.clone()
        module.zero_grad()
        got = replica(module)(x)
        got.sum().backward()
        assert_close(got, want)
        assert_close(module.up_proj.weight.grad, grad)


@pytest.mark.parametrize("make", [own, adopted])
def test_threads_that_call_one_module_at_once(make):
    module = make()
    inputs = [LARGE[:n].clone() for n in (4, 300, 17, TOKENS)]
    want = [module(x).detach() for x in inputs]
    grads = [torch.autograd.grad(module(x).sum(), list(module.parameters())) for x in inputs]

    def work(i: int) -> None:
        for _ in range(10):
            with torch.no_grad(), use_path("onednn"):
                assert_close(module(inputs[i]), want[i])
            with torch.no_grad():
                assert_close(module(inputs[i]), want[i])
            y = module(inputs[i])
            assert_close(
                list(torch.autograd.grad(y.sum(), list(module.parameters()))), list(grads[i])
            )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_a_forced_path_is_one_threads_own():
    seen = []
    with use_path("eager"):
        thread = threading.Thread(target=lambda: seen.append(plan.forced()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.skipif(not machine.onednn_enabled(), reason="this torch has no oneDNN")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks():
    module = own()
    x = torch.randn(8, HIDDEN)
    want = module(x)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with onednn.cache.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        signal.alarm(20)  # ends it, should it wait for ever
        with torch.no_grad(), use_path("onednn"):
            fine = torch.allclose(module(x), want, rtol=1e-3, atol=1e-4)
        os._exit(0 if fine and onednn.packed_bytes() else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
