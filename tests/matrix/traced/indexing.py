"""Masks, indices and counts, as detection and ranking code has them, with what CUDA takes of the CPU."""

import torch
import torch.nn.functional as F
from torch import nn

device = "cuda"
torch.cuda.set_device(0)
model = nn.Linear(6, 4).to(device)
optimizer = torch.optim.AdamW(model.parameters())
anchors = torch.rand(20, 6)
table = torch.eye(4)
rows = torch.tensor([0, 2, 4])
confusion = torch.zeros(4, 4, dtype=torch.long)
total = torch.tensor(0.0)

for _ in range(2):
    x = anchors.to(device)
    scores = model(x)
    labels = torch.arange(20, device=device) % 4
    picked = scores[rows] + scores[rows.tolist()] + scores[torch.arange(20) < 3]  # indices on the CPU
    positive = scores[labels > 0]  # a size that depends on values
    chosen = torch.masked_select(scores, labels[:, None] > 1)
    places = (labels == 1).nonzero()
    onehot = F.one_hot(labels, 4).float()
    spread = torch.zeros_like(scores).scatter_(1, labels[:, None], 1.0)
    scores = torch.where(spread > 0, scores, torch.tensor(-1.0))  # a number, though a tensor
    scores[0, :2] = torch.zeros(2)  # a copy from the CPU
    scores[rows] = torch.tensor(0.5)
    loss = F.mse_loss(scores, onehot) * torch.tensor(2.0) + picked.mean() + positive.mean() + chosen.mean()
    loss = loss + table.to(device)[labels].mean() + places.float().mean() / max(1, len(places))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = total + loss.detach()
    for truth, guess in zip(labels.cpu(), scores.argmax(1).cpu(), strict=True):  # SYNC
        confusion[truth, guess] += 1
print(total / 2, confusion.sum())  # SYNC
