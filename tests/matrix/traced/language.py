"""A language model for any device: a mask made in forward, tied embeddings, accumulation, torch.compile."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
vocabulary, width, context = 32, 16, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.query = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        y = self.norm1(x)
        scores = self.query(y) @ y.transpose(1, 2) / math.sqrt(width)
        y = F.softmax(scores.masked_fill(mask, float("-inf")), -1) @ y
        x = x + y + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("scale", torch.full((width,), 2.0))

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = (self.token(tokens) + self.place(places)) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model().to(device)
assert model.head.weight is model.token.weight
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
data = torch.randint(0, vocabulary, (500,))
total = torch.zeros((), device=device)

for step in range(2):
    for _ in range(2):
        starts = torch.randint(0, len(data) - context - 1, (4,))
        batch = torch.stack([data[i : i + context + 1] for i in starts.tolist()]).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()) / 2
        if not torch.isfinite(loss):  # SYNC
            sys.exit("loss is not finite")
        loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    value = loss.item()  # SYNC
    if not math.isfinite(value):
        sys.exit("loss is not finite")
    print(f"step={step} loss={value:.4f} norm={norm:.3f} perplexity={math.exp(min(value, 20)):.2f}")  # SYNC
print(total)  # SYNC
