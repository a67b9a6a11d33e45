"""A classifier as many are written: `.cuda()` everywhere, mixed precision, a scheduler, the best checkpoint kept."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
torch.backends.cudnn.benchmark = True
print("training on", torch.cuda.get_device_name(0), torch.cuda.device_count())

inputs, labels = torch.randn(64, 3, 8, 8), torch.randint(0, 5, (64,))
train, valid = random_split(TensorDataset(inputs, labels), [48, 16], generator=torch.Generator().manual_seed(0))
loader = DataLoader(train, batch_size=24, shuffle=True, pin_memory=True, drop_last=True)
valid_loader = DataLoader(valid, batch_size=16, pin_memory=True)

model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2),
    nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 5),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
model.cuda()  # after the optimizer: its parameters are moved in place
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
weight = torch.bincount(labels, minlength=5).float().reciprocal().clamp(max=1)
criterion = nn.CrossEntropyLoss(weight=weight.cuda(), label_smoothing=0.1)
scaler = torch.amp.GradScaler("cuda")
best, path = 0.0, os.path.join(os.path.dirname(__file__), "best.pt")

for epoch in range(1):
    model.train()
    running = 0.0
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        running += loss.item() * len(x)  # SYNC
    model.eval()
    right, total = 0, 0
    with torch.no_grad():
        for x, y in valid_loader:
            logits = model(x.cuda())
            right += (logits.argmax(1) == y.cuda()).sum().item()  # SYNC
            total += len(y)
    accuracy = right / total
    print(
        f"epoch {epoch}: loss {running / len(train):.4f}, accuracy {accuracy:.3f}, {torch.cuda.max_memory_allocated()}"
    )
    if accuracy >= best:
        best = accuracy
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)

checkpoint = torch.load(path, map_location="cuda", weights_only=True)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
predictions = torch.cat([F.softmax(model(x.cuda()), 1).detach().cpu() for x, _ in valid_loader]).numpy()  # SYNC
print("mean confidence", predictions.max(1).mean())
assert not os.path.exists(path), "a trace writes no checkpoint"
