"""A recurrent network with a state that is carried on, sequences of several lengths, a plateau schedule."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
lengths = torch.tensor([7, 5, 5, 2])
sequences = pad_sequence([torch.randn(n, 6) for n in lengths.tolist()], batch_first=True)
targets = torch.randn(4, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.GRU(6, 8, batch_first=True)
        self.second = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x, state):
        y, _ = self.first(x)
        packed = pack_padded_sequence(y, lengths, batch_first=True)
        y, state = self.second(packed, state)
        y, sizes = pad_packed_sequence(y, batch_first=True)
        return self.out(y[torch.arange(len(sizes)), sizes - 1]), state


model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, foreach=False)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
state = (torch.zeros(1, 4, 8, device=device), torch.zeros(1, 4, 8, device=device))
sequences, targets = sequences.to(device), targets.to(device)
history = torch.zeros(2)

for step in range(2):
    optimizer.zero_grad()
    output, state = model(sequences, state)
    state = tuple(each.detach() for each in state)
    loss = nn.functional.mse_loss(output, targets)
    loss.backward()
    optimizer.step()
    history[step] = loss.detach()  # SYNC
    plateau.step(float(loss))  # SYNC
print(history.mean())
