"""Data-parallel wrappers with one classic mistake each."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce


class Right(nn.Module):
    """The handout's overlapped wrapper, as a reader may write it."""

    def __init__(self, module):
        super().__init__()
        self.module, self.handles = module, []
        self.broadcast(module)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def broadcast(self, module):
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def on_gradient(self, parameter):
        parameter.grad.div_(dist.get_world_size())
        self.handles.append(all_reduce(parameter.grad, async_op=True))

    def finish_gradient_synchronization(self):
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


class ForgetsToBroadcast(Right):
    def broadcast(self, module):
        pass


class ForgetsBuffers(Right):
    def broadcast(self, module):
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)


class ReducesTheParameter(Right):
    def on_gradient(self, parameter):
        with torch.no_grad():
            parameter.div_(2 * dist.get_world_size())
            self.handles.append(dist.all_reduce(parameter.data, async_op=True))


class ForgetsToAverage(Right):
    def on_gradient(self, parameter):
        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))


class WaitsInBackward(Right):
    def on_gradient(self, parameter):
        parameter.grad.div_(dist.get_world_size())
        all_reduce(parameter.grad)


class SendsAfterBackward(Right):
    def on_gradient(self, parameter):
        pass

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                super().on_gradient(parameter)
        super().finish_gradient_synchronization()


class ForgetsToWait(Right):
    def finish_gradient_synchronization(self):
        self.handles.clear()


class ForgetsTheLastHandle(Right):
    def finish_gradient_synchronization(self):
        for handle in self.handles[:-1]:
            handle.wait()
        self.handles.clear()


class ReducesACopy(Right):
    def on_gradient(self, parameter):
        self.handles.append(dist.all_reduce(parameter.grad / dist.get_world_size(), async_op=True))


class ForgetsTheLastParameter(Right):
    def on_gradient(self, parameter):
        if parameter is not list(self.module.parameters())[-1]:
            super().on_gradient(parameter)


class UnfreezesEverything(Right):
    def __init__(self, module):
        super().__init__(module)
        for parameter in module.parameters():
            parameter.requires_grad_(True)


class HidesTheModule(Right):
    def __init__(self, module):
        super().__init__(module)
        self.inner = self.module
        del self.module

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Crashes(Right):
    def finish_gradient_synchronization(self):
        raise KeyError("oh")


class ReturnsNothing(Right):
    def forward(self, *args, **kwargs):
        self.module(*args, **kwargs)


class NeverEnds(Right):
    def finish_gradient_synchronization(self):
        while True:
            time.sleep(0.01)
