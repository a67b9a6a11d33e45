"""What CUDA takes of tensors on several devices, and what it refuses, in PyTorch's words."""

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence

SAME = "Expected all tensors to be on the same device, but found at least two devices"
x, v, one = torch.randn(4, 3).cuda(), torch.randn(3), torch.tensor(0.5)
rows, mask, labels = torch.tensor([0, 2]), torch.tensor([True, False, True, True]), torch.tensor([0, 1, 2, 0])
state = torch.zeros(1, 4, 5)
gru = torch.nn.GRU(3, 5, batch_first=True).cuda()


def refused(words, function):
    said = f"not refused, line {function.__code__.co_firstlineno}"
    try:
        function()
    except (RuntimeError, TypeError) as error:
        said = str(error)
    assert words in said, said


def assign(target, index, value):
    target[index] = value


# A CPU tensor without dimensions is a number to elementwise operations, and to no others.
for taken in (
    x + one,
    one * x,
    x.mul(one),
    torch.where(x > 0, x, one),
    x.masked_fill(x > 0, one),
    torch.lerp(x, x, one),
):
    assert taken.device == torch.device("cuda:0")
x.add_(one)
torch._foreach_mul_([x, x.clone()], one)
refused(SAME, lambda: x + v)
refused(SAME, lambda: v * x.sum())
refused(SAME, lambda: one.clone().add_(x.sum()))  # the result would be on the CPU
refused(SAME, lambda: torch.stack([one, x.sum()]))
refused(SAME, lambda: torch.cat([torch.tensor([]), x[0]]))
refused(SAME, lambda: x.clamp(min=one))
refused(SAME, lambda: torch.addmm(one, x, x.T))
refused(SAME, lambda: torch._foreach_add([x, x], [torch.ones(4, 3), x]))
refused("expected self and mask to be on the same device", lambda: x.masked_fill(torch.ones(4, 3) > 0, 0.0))

# Indices may be on the CPU; what is indexed there takes no others.
assert x[rows].device == x[mask].device == x[:, rows[0]].device == x.device
assign(x, rows, one)
assign(x, 0, v)  # a copy
assign(v, 0, x[0, 0])
v.copy_(x[0])
refused(SAME, lambda: assign(x, rows, torch.ones(2, 3)))
refused("indices should be either on cpu or on the same device as the indexed tensor (cpu)", lambda: v[rows.cuda()])
refused(SAME, lambda: x.index_select(0, rows))
refused(SAME, lambda: x.gather(1, rows[:, None]))
refused(SAME, lambda: F.embedding(rows, x))

# Losses, matrix products, normalisation, recurrent networks.
refused(SAME, lambda: F.cross_entropy(x, labels))
refused(SAME, lambda: F.cross_entropy(x, labels.cuda(), weight=torch.ones(3)))
refused(SAME, lambda: F.linear(x, torch.ones(2, 3)))
refused(SAME, lambda: F.layer_norm(x, (3,), torch.ones(3).cuda(), torch.ones(3)))
refused(SAME, lambda: F.binary_cross_entropy_with_logits(x, torch.ones(4, 3)))
refused("not at the same device", lambda: gru(x[:, None], state))
refused(
    "argument should be a 1D CPU int64 tensor", lambda: pack_padded_sequence(x[:, None], labels.cuda() * 0 + 1, True)
)

# Generators, pinned memory, arrays.
there, here = torch.Generator("cuda"), torch.Generator()
torch.randn(2, device="cuda", generator=there), torch.randperm(4, generator=here)
assert (there.device, here.device) == (torch.device("cuda"), torch.device("cpu"))
refused("Expected a 'cuda' device type for generator but found 'cpu'", lambda: x.normal_(generator=here))
refused("Expected a 'cpu' device type for generator but found 'cuda'", lambda: torch.randperm(4, generator=there))
refused("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned", lambda: x.pin_memory())
refused("can't convert cuda:0 device type tensor to numpy", lambda: x.numpy())
refused("invalid device ordinal", lambda: torch.cuda.set_device(1))

# Lengths and targets of this loss may be on the CPU, a distribution looks at its parameters.
x.requires_grad_()
length = torch.tensor([4])
F.ctc_loss(x[:, None].log_softmax(2), torch.ones(1, 2, dtype=torch.long), length, length // 2).backward()
assert x.grad.shape == x.shape
assert torch.distributions.Normal(x, x.exp()).rsample().device == x.device
assert torch.bincount(labels.cuda(), minlength=5).shape == (5,)
