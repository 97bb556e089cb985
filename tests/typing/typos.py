"""Eight typos of a user's program: `make check` fails if pyright does not find one of them."""
# pyright: basic, reportUnnecessaryTypeIgnoreComment=true

import torch
from torch import nn

import anybatch as ab


def program() -> None:
    model, loss = nn.Linear(8, 3), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ab.Options(batchnorm="micro")  # pyright: ignore[reportCallIssue]
    ab.Step(model, loss, optimizer, precision="bf16")  # pyright: ignore[reportArgumentType]
    ab.Step(model, 3, optimizer)  # pyright: ignore[reportArgumentType]
    ab.Step(model, loss, optimizer, micro_batch=4.0)  # pyright: ignore[reportArgumentType]
    ab.Step(model, loss, torch.optim.SGD)  # pyright: ignore[reportArgumentType]
    ab.Step(model, loss, optimizer, callbacks=[3])  # pyright: ignore[reportArgumentType]
    step = ab.Step(model, loss, optimizer, micro_batch=4, options=ab.Options(non_finite="skip"))
    step.forsee((torch.randn(32, 8), torch.randint(3, (32,))))  # pyright: ignore[reportAttributeAccessIssue]
    print(step((torch.randn(32, 8), torch.randint(3, (32,)))).los)  # pyright: ignore[reportAttributeAccessIssue]
