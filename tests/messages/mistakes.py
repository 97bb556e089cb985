"""Mistakes of the first days with a library: a name, a program, and words that its message must contain.

A program has the names of `PRELUDE`: a small model, its loss, optimizer, rows `x` and `y`, and a step.
"""

from tests.messages.pages import TASKS

PRELUDE = """
from tests.options import flat
import math, warnings
from functools import partial
import torch, anybatch as ab
from anybatch.parallel import Cast, DeepGradientCompression as Compression
from anybatch.step import ByLength
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset, default_collate
from tests.messages.small import bert, clip, cli

torch.manual_seed(0)
x, y = torch.randn(8, 3), torch.randint(2, (8,))
samples, data = [*zip(x, y)], TensorDataset(x, y)
model, loss = nn.Linear(3, 2), nn.CrossEntropyLoss()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)

def Step(model=model, loss=loss, optimizer=sgd, micro_batch=4, **more):
    return ab.Step(model, loss, optimizer, micro_batch=micro_batch, **flat(more))

def Trainer(train=(x, y), *more, **options):
    return ab.Trainer(step, train, *more, **{"batch_size": 4, "progress": False} | options)

step = Step()
"""

OWN = "Step(loss=lambda model, micro: {})((x, y))"
SUM = "F.cross_entropy(model(micro[0]), micro[1], reduction='sum')"
TOTAL = OWN.format("ab.Total({}, {})")
FIT = f"lambda model, micro: ab.Total({SUM}, len(micro[0]))"
PROMISE = f"Step(loss=ab.Terms({FIT}, weight=lambda batch: {{}}))((x, y))"
WHOLE = "Step(loss=ab.WholeBatch({}))((x,))"
ANY_LOSS = ("nn.CrossEntropyLoss()", "ab.Total(")

Mistakes = dict[str, tuple[str, ...]]

BATCHES: Mistakes = {
    "inputs and target as two arguments": ("step(x, y)", "got 2 arguments", "step((inputs, target))"),
    "two arguments of add": ("step.window().add(x, y)", "got 2 arguments", "add((inputs, target))"),
    "two arguments of a BatchLoss": ("ab.BatchLoss(model, loss)(x, y)", "batch_loss((inputs, target))"),
    "inputs alone": ("step(x)", "got Tensor", "in one tuple", "def loss(model, micro)"),
    "a loader": ("step(DataLoader(data, batch_size=4))", "DataLoader", "for batch in loader: step(batch)"),
    "a data set": ("step(data)", "TensorDataset", "DataLoader(dataset, batch_size=...)"),
    "an iterator": ("step(iter([(x, y)]))", "list_iterator", "for batch in loader"),
    "nothing": ("step(None)", "got NoneType", "without `return`"),
    "no tensor": ("step({'x': None})", "got dict", "the tensors of all rows"),
    "NumPy": ("step((x.numpy(), y))", "ndarray at [0]", "torch.from_numpy"),
    "lists of numbers": ("step((x.tolist(), y))", "float at [0][0][0]", "a tensor with one entry per row"),
    "texts": ("step({'x': x, 'text': ['a'] * 7, 'y': y})", "got 7 entries", "one entry for each"),
    "samples without a collate": ("step(samples)", "[0][0]: (3,)", "collate="),
    "a tensor for samples": ("Step(collate=default_collate)(x)", "got Tensor", "leave `collate` out"),
    "no samples": ("Step(collate=default_collate)([])", "got []"),
    "samples of an iterator": ("Step(collate=default_collate)(iter([x]))", "got list_iterator"),
    "a collate without return": ("Step(collate=print)(samples)", "got NoneType", "from a collate"),
    "other lengths": ("step((x, y[:5]))", "[0]: (8, 3), [1]: (5,)", "one entry per row"),
    "time before rows": ("step((torch.randn(5, 8, 3), y))", "[0]: (5, 8, 3)", "one entry per row"),
    "a number for all rows": ("step((x, y, torch.tensor(2.0)))", "[2]: ()", "in the model or the loss"),
    "no rows": ("step((x[:0], y[:0]))", "[0]: (0, 3)", "Skip empty batches"),
    "another device": ("step((x.to('meta'), y))", "device cpu, got meta", ".to(device)"),
    "a target elsewhere": ("step((x, y.to('meta')))", "device cpu, got meta", ".to(device)"),
    "a dict without target": ("step({'input': x})", "got ['input']", "micro['input']", "micro['target']"),
    "two targets": ("step({'input': x, 'y': y, 'labels': y})", "got ['input', 'y', 'labels']", "micro['y']"),
    "an unknown key": ("step({'input': x, 'y': y, 'idx': y})", "'idx': (4,) int64", "mappings go in by name"),
    "too many features": ("step((torch.randn(8, 5), y))", "Linear with [(4, 5) float32]", "Compare shapes"),
    "inputs of another dtype": ("step((x.double(), y))", "Linear with [(4, 3) float64]", "dtypes"),
    "float classes": ("step((x, y.float()))", "CrossEntropyLoss with [(4, 2) float32, (4,) float32]"),
    "a column of classes": ("step((x, y[:, None]))", "(4, 1) int64", "Compare shapes"),
    "classes out of range": ("step((x, y + 5))", "Target 5", "CrossEntropyLoss with", "rows 0 to 3"),
    "NaN in the data": ("step((x * math.nan, y))", "got nan", "rows 0 to 3", "bad data"),
    "a row against a column": ("Step(loss=nn.MSELoss())((x, x[:, 0]))", "(4, 2) and (4,)", "target[:, None]"),
    **{f"a tensor that is {name}": (
        f"warnings.simplefilter('ignore'); step(({made}, y))", f"got a {kind} tensor at [0]", "collate=")
       for name, kind, made in (
           ("jagged", "nested", "torch.nested.nested_tensor([*x[:, None]], layout=torch.jagged)"),
           ("nested", "nested", "torch.nested.nested_tensor([*x])"),
           ("sparse", "sparse_coo", "x.to_sparse()"),
       )},
    "several targets of a PerRow": (
        "Step(loss=ab.PerRow(lambda out, y: F.cross_entropy(out, y[0])))((x, (y, y)))",
        "(4,) int64, (4,) int64]", "each of several targets as an argument of its own"),
    "no order": ("Step(order='size')", "order"),
    "an order with BatchNorm": ("Step(order='length', batch_norm='micro')", "order"),
    "a column kept with BatchNorm": ("Step(order=ByLength(keep=(1,)), batch_norm='micro')", "order"),
    "a window by length": ("Step(order='length').window()", "whole batches"),
    "samples without lengths": (
        "Step(order='length', collate=torch.tensor)([1, 2])", "samples whose lengths"),
    "a column of samples": (
        "Step(order=ByLength(keep=(1,)), collate=torch.tensor)([[1, 2], [3]])", "got 1. ", "with a collate"),
}  # fmt: skip

LOSSES: Mistakes = {
    "a mean": (OWN.format("F.cross_entropy(model(micro[0]), micro[1])"), "shape ()", "micro[1]", "ab.Total("),
    "a mean of a dict": (
        "Step(loss=lambda model, micro: model(micro['a']).mean())({'a': x, 'y': y})",
        "model(micro['a']), micro['y'], reduction"),
    "a float": (OWN.format(f"{SUM}.item()"), "got float", "ab.Total("),
    "a tuple": (OWN.format(f"({SUM}, 4)"), "got tuple", "ab.Total("),
    "nothing": (OWN.format("None"), "got NoneType", "ab.Total("),
    "a mean, uncut": ("Step(loss=lambda m, batch: m(batch[0]).mean(), micro_batch=None)((x, y))", "shape ()"),
    "no terms": (OWN.format("{}"), "got an empty one"),
    "infinite": (TOTAL.format(f"{SUM} / 0", 8), "got inf for 'loss'"),
    "infinity times 0": (TOTAL.format(f"({SUM} * 0).abs().sqrt()", 8), "division by zero"),
    "a weight with gradient": (TOTAL.format(SUM, SUM), "without gradient"),
    "a negative weight": (TOTAL.format(SUM, -1), "got -1"),
    "a promise that is not kept": (PROMISE.format(7), "batch's 7 for 'loss', got 8"),
    "a negative promise": (PROMISE.format(-8), "got -8"),
    "a promise that is no number": (PROMISE.format("math.nan"), "got nan"),
    "a promise with gradient": (PROMISE.format("torch.ones((), requires_grad=True)"),),
    "a promise for each row": (PROMISE.format("torch.ones(2)"),),
    "a coefficient of none": (
        f"Step(loss=ab.Terms({FIT}, coefficients=dict(other=1.0)))((x, y))",
        "got ['loss'] without ['other']"),
    "other terms in the last micro-batch": (
        f"Step(loss=lambda m, b: {{'a' if len(b[1]) == 3 else 'b': ({FIT})(m, b)}}, micro_batch=3)((x, y))",
        "got ['b'] after ['a']"),
    "a WholeBatch of no function": ("ab.WholeBatch(3)", "function"),
    **{f"loss_rows={rows}": (f"ab.WholeBatch(torch.sum, loss_rows={rows})", "loss_rows", f"got {rows}")
       for rows in (0, True, 1.5)},
    "a WholeBatch that joins views": (
        WHOLE.format("torch.sum, outputs=lambda m, b: torch.cat([m(b[0])] * 2)"), "one entry per row"),
    "a WholeBatch that is no scalar": (WHOLE.format("lambda out: out"), "one real number"),
    "rows of a WholeBatch without a total": (
        WHOLE.format("lambda out, rows: out.sum(), loss_rows=3"), "ab.Total"),
    "a WholeBatch without gradient": (
        WHOLE.format("lambda out: out.detach().sum()"), "depends on the parameters"),
    "a scalar that differs": (
        WHOLE.format("lambda a, b: a.sum() * b, outputs=lambda m, b: (m(b[0]), b[0].sum())"),
        "same for every micro-batch"),
    "a window of a WholeBatch": ("Step(loss=ab.WholeBatch(torch.sum)).window()", "window"),
    "named means": (OWN.format("{'a': x.mean()}"), "{'a': 'Tensor'}", "ab.Total("),
    "detached": (OWN.format(f"ab.Total({SUM}.detach(), 4)"), "['loss'] without gradient", ".detach()"),
    "not summed": (OWN.format("ab.Total(model(micro[0]), 4)"), "shape (4, 2)", ".sum()"),
    "a mean taken already": (
        OWN.format("ab.Total(F.cross_entropy(model(micro[0]), micro[1]), 1)"), "8 rows as 8",
        "ab.check(model, loss, batch)"),
    "pairs of rows": (
        OWN.format("ab.Total((model(micro[0]) @ model(micro[0]).T).logsumexp(0).sum(), len(micro[0]))"),
        "ab.WholeBatch"),
    "the other arguments": (OWN.replace("model, micro", "output, target").format("output - target"),
        "loss(model, micro), not as loss(outputs, targets)"),
    **{f"the other arguments, {name}": (
        f"Step(loss=lambda a, b: F.{name}(a, b))({rows})", "not as loss(outputs, targets)", "ab.PerRow(loss)")
       for name, rows in (
           ("binary_cross_entropy_with_logits", "(x, x[:, :2])"), ("mse_loss", "dict(x=x, y=x[:, :2])"))},
    "a sum divided by its mask": (
        "def fn(m, b): return (m(b[0])[:, 0] * b[1]).sum() / b[1].sum()\n"
        "Step(loss=ab.ModelLoss(call=fn))((x, y))", "divided afterwards", "x[mask].mean()"),
    "a router's loss of one's own": (
        "def fn(m, b): return 2 * (m(b[0]).mean(0) * m(b[0]).softmax(1).mean(0)).sum()\n"
        "Step(loss=ab.ModelLoss(call=fn))((x, y))", "a sum over means of rows", "in sum", "ab.WholeBatch"),
    "three arguments": (OWN.replace("micro:", "a, b:").format("0"), "loss(model, micro)", *ANY_LOSS),
    "a dict taken by number": (
        f"Step(loss=lambda model, micro: {SUM})(dict(a=x, y=y))", "{'a': (4, 3) float32, 'y': (4,) int64}"),
    "a tuple taken by name": (OWN.format("model(micro['a'])"), "[(4, 3) float32, (4,) int64]"),
    "a class": ("Step(loss=nn.CrossEntropyLoss)", "the class CrossEntropyLoss", "nn.CrossEntropyLoss()"),
    "a value": ("Step(loss=loss(model(x), y))", "got Tensor", *ANY_LOSS),
    "a name": ("Step(loss='mse')", "got str", *ANY_LOSS),
    "None": ("Step(loss=None)", "got NoneType", *ANY_LOSS),
    "reduction='none'": ("Step(loss=nn.MSELoss(reduction='none'))", "got 'none'", "'mean', 'sum'"),
    "a loss with its own forward": (
        "class Focal(nn.CrossEntropyLoss):\n    forward = lambda self, a, b: (a * b[:, None]).sum()\n"
        "Step(loss=Focal())", "got Focal", "ab.Terms"),
    "a layer": ("Step(loss=nn.Identity())", "got Identity", "ab.Total("),
    "negative weights": ("Step(loss=nn.CrossEntropyLoss(-torch.ones(2)))", "-1.0", "at least 0"),
    "model and loss swapped": ("ab.Step(loss, model, sgd)", "CrossEntropyLoss and Linear", "Swap them"),
    "transformers and a loss of torch": (
        "m, batch = bert(); ab.Step(m, loss, torch.optim.SGD(m.parameters()), micro_batch=4)(batch)",
        "got SequenceClassifierOutput", "ab.ModelLoss()"),
    "transformers without labels": (
        "m, batch = bert(); del batch['labels']\n"
        "ab.Step(m, ab.ModelLoss(), torch.optim.SGD(m.parameters()), micro_batch=4)(batch)",
        "got None in a SequenceClassifierOutput", "Put the labels into the batch"),
    "transformers and a tuple": (
        "m, batch = bert()\n"
        "ab.Step(m, ab.ModelLoss(), torch.optim.SGD(m.parameters()), micro_batch=4)((*batch.values(),))",
        "BertForSequenceClassification with [(4, 5) int64,", "by name"),
    "return_loss=True of CLIP": (
        "m, batch = clip(); ab.Step(m, ab.ModelLoss(), torch.optim.SGD(m.parameters()))(batch)",
        "bool at ['return_loss']", "Pass a setting to the model", "ab.WholeBatch"),
    "ModelLoss and a plain model": ("Step(loss=ab.ModelLoss())({'input': x})", "(3, 2)", "another loss"),
    "no_grad": ("with torch.no_grad(): step((x, y))", "['loss'] without gradient", "torch.no_grad()"),
    "a second backward": (
        "value = ab.BatchLoss(model, loss)((x, y)); value.backward(); value.backward()", "got another",
        "Call batch_loss(batch) again"),
    "create_graph": ("ab.BatchLoss(model, loss)((x, y)).backward(create_graph=True)", "create_graph=True"),
}  # fmt: skip

SETTINGS: Mistakes = {
    "a class for a model": ("Step(nn.Linear)", "the class Linear", "Call a class"),
    "a function for a model": ("Step(torch.sin)", "got builtin", "wrap a function in a module"),
    "an optimizer's class": ("Step(optimizer=torch.optim.SGD)", "the class SGD", "torch.optim.SGD("),
    "an optimizer's name": ("Step(optimizer='adam')", "got str", "torch.optim.SGD("),
    "no optimizer": ("Step(optimizer=None)", "got None", "ab.BatchLoss"),
    "an empty list of optimizers": ("Step(optimizer=[])", "got []", "torch.optim.SGD("),
    "parameters for an optimizer": ("Step(optimizer=model.parameters())", "generator", "torch.optim.SGD("),
    "an optimizer of another model": (
        "Step(nn.Linear(3, 2))", "got 2 that are none of its", "from model.parameters()"),
    "one parameter in two optimizers": (
        "Step(optimizer=[sgd, torch.optim.SGD([model.bias], lr=1)])", "got 1 in optimizers 0 and 1"),
    "all frozen, in a window": (
        "model.requires_grad_(False); step.window()", "got 2 that are all frozen", "requires_grad=True"),
    "all frozen": ("model.requires_grad_(False); step((x, y))", "got 2 that are all frozen", "requires_grad"),
    "LBFGS": ("Step(optimizer=torch.optim.LBFGS(model.parameters()))", "got LBFGS", "use another one"),
    "a scheduler's class": (
        "Step(options=ab.Options(scheduler=StepLR))", "the class StepLR", "StepLR(optimizer, 10)"),
    "a scheduler of another optimizer": (
        "Step(options=ab.Options(scheduler=StepLR(torch.optim.SGD([x], lr=1), 1)))",
        "StepLR", "from the same optimizer"),
    "a scheduler that waits": (
        "Step(options=ab.Options(scheduler=ReduceLROnPlateau(sgd)))", "got Reduce", "after validation"),
    "accumulation_steps": ("Step(accumulation_steps=4)", "Step(accumulation_steps=...)", "micro_batch=..."),
    "clip_grad": ("Step(clip_grad=1.0)", "Step(clip_grad=...)", "clip_norm=..."),
    "max_norm": ("Step(max_norm=1.0)", "Step(max_norm=...)", "clip_norm=..."),
    "an old option": (
        "ab.Step(model, loss, sgd, batch_norm='micro')", "Step(batch_norm=", "options=ab.Options(batch_norm"),
    "listeners": ("Step(listeners=[print])", "Step(listeners=...)", "callbacks=[...]"),
    "a misspelt option": ("Step(batchnorm='micro')", "you mean options=ab.Options(batch_norm=...)?"),
    "a misspelt keyword": ("Step(micro_bach=4)", "Did you mean micro_batch=...?"),
    "gradient_accumulation_steps": ("Step(gradient_accumulation_steps=4)", "Write micro_batch=..., the rows"),
    "max_grad_norm": ("Step(max_grad_norm=1.0)", "Write clip_norm=..., the largest 2-norm"),
    "amp": ("Step(amp=True)", 'Write precision="bf16-mixed"'),
    "tensorboard": ("Step(tensorboard=True)", "It takes model, loss, optimizer, micro_batch"),
    "options as a dict": ("Step(options={'check': False})", "Write options=ab.Options(...)."),
    "a keyword of a step": ("ab.Options(clip_norm=1.0)", "Write Step(..., clip_norm=...)."),
    "a misspelt field": ("ab.Options(non_finit='skip')", "Did you mean non_finite=...?"),
    "clipping in a BatchLoss": ("ab.BatchLoss(model, loss, clip_norm=1)", "in your loop after backward()"),
    "an option of a BatchLoss": ("ab.BatchLoss(model, loss, check=False)", "options=ab.Options(check=...)."),
    "an option of plan": ("ab.plan(model, loss, sgd, (x, y), recompute='all')", "ab.Options(recompute=...)."),
    "an option of check": ("ab.check(model, loss, (x, y), batch_norm='micro')", "Options(batch_norm=...)."),
    "two clippings": ("Step(clip_norm=1.0, options=ab.Options(clip_value=1.0))", "got both", "Leave one out"),
    "two arguments for a callback": (
        "Step(callbacks=[lambda step, report: 0])", "does not take a StepReport alone"),
    "a metric among callbacks": ("Trainer(callbacks=[ab.accuracy])", "accuracy", "ab.Metrics(name=...)"),
    "a method with too few arguments": (
        "C = type('C', (), {'epoch': lambda self, report: 0}); Trainer(callbacks=[C()])",
        "with another epoch()", "def epoch(self, trainer, report)"),
    "a method of another library": (
        "C = type('C', (), {'update': print, 'on_epoch_end': print}); Step(callbacks=[C()])",
        "'on_epoch_end', which is never called"),
    "early stopping without a trainer": (
        "Step(callbacks=[ab.EarlyStopping()])((x, y))", "got a step alone", "ab.Trainer"),
    "a metric without a trainer": (
        "Step(callbacks=[ab.Metrics(acc=ab.accuracy)])((x, y))", "got a step alone", "ab.Trainer"),
    "the number of micro-batches": ("Step(num_micro_batches=4)", "rows of a micro-batch", "micro_batch=..."),
    "no callback": ("Step(callbacks=[3])", "got 3", "Give it one of"),
    "no list of callbacks": ("Step(callbacks=None)", "a list of callbacks, got None. Write callbacks=[...]"),
    "a callback without a list": ("Step(callbacks=ab.EMA(0.5))", "got EMA(decay=0.5, buffers=False, vali"),
    "a callback's class": ("ab.BatchLoss(model, loss, callbacks=[ab.EMA])", "Pass an object: EMA(...)"),
    "a callback without methods": ("Trainer(callbacks=[ab.Callback()])", "which has none of them"),
    "a method with a prefix": (
        "C = type('C', (), {'on_update': print}); Trainer(callbacks=[C()])", "called. Call it 'update'"),
    "a misspelt method": (
        "C = type('C', (ab.Callback,), {'gradient': print}); ab.BatchLoss(model, loss, callbacks=[C()])",
        "a method 'gradient', which is never called. Call it 'gradients'"),
    "micro_batch='auto'": ("Step(micro_batch='auto')", "got 'auto'", 'memory="auto"'),
    "micro_batch=0": ("Step(micro_batch=0)", "got 0", "Leave it out"),
    "micro_batch as text": ("Step(micro_batch='32')", "got '32'", "Pass an int"),
    "a share as a float": ("Step(memory=0.8)", "got 0.8", '"80%"'),
    "12 gigs": ("Step(memory='12 gigs')", "got '12 gigs'", '"12GB"'),
    "120%": ("Step(memory='120%')", "got '120%'", "at most 100"),
    "-1GB": ("Step(memory='-1GB')", "got '-1GB'", "above 0"),
    "a device for memory": ("Step(memory='cuda')", "got 'cuda'", '"12GB"'),
    "too little memory": ("Step(memory=99)((x, y))", "got 99 B", "take 224 B together"),
    "bf16": ("Step(precision='bf16')", "got 'bf16'", '"bf16-mixed"'),
    "fp16": ("Step(precision='fp16')", "got 'fp16'", '"fp16-mixed"'),
    "16": ("Step(precision=16)", "got 16", '"fp16-mixed"'),
    "a dtype": ("Step(precision=torch.bfloat16)", "got torch.bfloat16", '"bf16-mixed"'),
    "clip_norm as text": ("Step(clip_norm='1')", "got '1'", "positive number"),
    "clip_norm=nan": ("Step(clip_norm=math.nan)", "got nan", "positive number"),
    "clip_value of complex entries": (
        "m = nn.Linear(3, 2, dtype=torch.complex64); "
        "ab.Step(m, loss, torch.optim.SGD(m.parameters()), options=ab.Options(clip_value=1.0))",
        "the complex weight", "clip_norm"),
    "a cut that leaves a row alone": (
        "m = nn.Sequential(model, nn.BatchNorm1d(2)); Step(m, batch_norm='micro', micro_batch=7)((x, y))",
        "the cut 7+1 leaves one row", "another micro_batch"),
    "recompute=True": ("Step(options=ab.Options(recompute=True))", "got True", "Pass 'all'"),
    "recompute as text": ("Step(options=ab.Options(recompute='layers'))", "one of", "got 'layers'"),
    "a policy": ("Step(options=ab.Options(recompute={'weight': 'forget'}))", "got 'forget'"),
    "recompute of nothing": ("Step(options=ab.Options(recompute='all'))", "got none in Linear"),
    "recompute of a name": ("Step(options=ab.Options(recompute=['nothing*']))", "got 'nothing*'"),
    "two adds with BatchNorm": (
        "m = nn.Sequential(model, nn.BatchNorm1d(2)); w = Step(m).window(); w.add((x, y)); w.add((x, y))",
        "BatchNorm"),
    "BatchNorm": (
        "m = nn.Sequential(model, nn.BatchNorm1d(2)); Step(m)((x, y))", "module 1", "to_group_norm"),
    "DataParallel": ("Step(nn.DataParallel(model))", "DataParallel", "model.module"),
    "no server": ("ab.ParameterServer(servers=0)", "whole number of at least 1, got 0"),
    "no worker": ("ab.ParameterServer(workers=0)", "Expected workers to be a whole"),
    "the last worker": (
        "from tests.parallel.inline import Inline; one = ab.ParameterServer(workers=1, cluster=Inline(0))\n"
        "one.remove_worker()", "got 1 in all. Call stop()"),
    "a half unit": ("ab.ParameterServer(units=1.5)", "whole number of at least 1, got 1.5"),
    "a cast": ("Cast('fp8')", "one of ('fp16', 'bf16'), got 'fp8'"),
    "sparsity of all": ("Compression(1.0, warmup_updates=0)", "at least 0 and below 1, got 1.0"),
    "momentum below 0": ("Compression(0.9, -0.1, warmup_updates=0)", "momentum to be at least 0", "got -0.1"),
    "updates below 0": ("Compression(warmup_updates=-1)", "at least 0, got -1"),
    "clipping without ranks": ("Compression(clip_norm=1.0, warmup_updates=0)", "got 1.0 and ranks=None"),
    "clipping to 0": ("Compression(clip_norm=0.0, ranks=2, warmup_updates=0)", "got 0.0 and ranks=2"),
    "replicate in one process": ("Step(options=ab.Options(strategy='replicate'))", "got 1", "torchrun"),
    "a setting set later": ("step.clip_norm = 1.0", "'clip_norm'", "new Step("),
    "add after the end": ("w = step.window(); w.discard(); w.add((x, y))", "closed", "step.window()"),
    "a step in an open window": ("step.window().add((x, y)); step((x, y))", "8 rows", "close()"),
    **{f"{act} in an open window": (
        f"t = Trainer(); t.step.window().add((x, y)); t.{act}('run')", f"to {act}, got one with 8")
       for act in ("save", "resume")},
    "state of a step in an open window": ("step.window().add((x, y)); step.state_dict()", "no open window"),
    "unfrozen between two adds": (
        "model.bias.requires_grad_(False); w = step.window(); w.add((x, y))\n"
        "model.bias.requires_grad_(True); w.add((x, y))", "same 1 parameter"),
    "a callback twice": (
        "C = type('C', (), {'update': print})()\n"
        "ab.Trainer(Step(callbacks=[C]), (x, y), batch_size=4, callbacks=[C])", "each callback once"),
    "early stopping without validation": (
        "Trainer(callbacks=[ab.EarlyStopping()]).fit(1)", "trainer with validation rows"),
    "early stopping by no metric": (
        "Trainer(validation=(x, y), callbacks=[ab.EarlyStopping('acuracy')]).fit(1)", "got 'acuracy'"),
    "an empty window": ("step.window().close()", "got 0 rows", "add()"),
    "backward in a window": (
        "w = step.window(); loss(model(x), y).backward(); w.add((x, y))", "['weight', 'bias']", "zero_grad"),
    "an optimizer for BatchLoss": ("ab.BatchLoss(model, loss, optimizer=sgd)", "optimizer=...", "ab.Step"),
    "a model for a step": ("ab.Trainer(model, (x, y))", "got Linear", "ab.Step(model, loss, optimizer)"),
    "rows without batch_size": ("Trainer(batch_size=None)", "batch_size", "got None", "Pass an int"),
    "rows of other lengths": ("Trainer((x, y[:4]))", "[1]: (4,)", "one entry per row"),
    "a data set for a trainer": ("Trainer(data)", "TensorDataset", "DataLoader(dataset"),
    "a generator": ("Trainer((one for one in [(x, y)]))", "generator", "or a list"),
    "the folder of another run": (
        "for _ in range(2): Trainer(out='run').fit(1)", "run: expected", "resume('run')", "another folder"),
    "a checkpoint that is missing": ("Trainer().resume('nowhere')", "nowhere", "Check the path"),
    "metrics=": ("Trainer(metrics={'acc': ab.accuracy})", "Trainer(metrics=...)", "ab.Metrics(accuracy="),
    "a metric's name": ("ab.Metrics(acc='accuracy')", "'accuracy'", "Pass functions"),
    "a metric called loss": (
        "Trainer(callbacks=[ab.Metrics(loss=ab.accuracy)])", "'loss' beside the loss", "another name"),
    "a metric twice": (
        "Trainer(callbacks=[ab.Metrics(a=ab.accuracy), ab.Metrics(a=ab.accuracy)])", "'a' twice"),
    "an option of the step": ("Trainer(micro_batch=4)", "in the step", "ab.Step(..., micro_batch=...)"),
    "a scheduler for a trainer": ("Trainer(scheduler=1)", "in the step", "ab.Options(scheduler=...)"),
    "epochs of a trainer": ("Trainer(epochs=3)", "Trainer(epochs=...)", "trainer.fit(epochs=...)"),
    "patience of a trainer": ("Trainer(patience=3)", "Trainer(patience=...)", "ab.EarlyStopping("),
    "a metric that is a mean": (
        "Trainer(validation=(x, y), callbacks=[ab.Metrics(acc=lambda a, b: 0.5)]).fit(1)",
        "'acc'", "float", "Total("),
    "best_by of no metric": ("Trainer(validation=(x, y), best_by='acc')", "got 'acc'", "['loss']"),
    "drop_last leaves nothing": (
        "Trainer(DataLoader(data, batch_size=16, drop_last=True)).fit(1)", "epoch 1", "drop_last=True"),
    "drop_last leaves no validation": (
        "Trainer(validation=DataLoader(data, batch_size=16, drop_last=True)).fit(1)", "validation", "False"),
    "epochs=0": ("Trainer().fit(epochs=0)", "epochs", "got 0"),
    "keep without a folder": ("Trainer(keep=2)", "keep=2", "out="),
    "check of one row": ("ab.check(model, loss, (x[:1], y[:1]))", "got 1", "larger batch"),
    "check of a loader": ("ab.check(model, loss, DataLoader(data))", "DataLoader", "for batch in loader"),
    "plan for an unknown card": (
        "ab.plan(model, loss, sgd, (x, y), memory='1GB', device='a100')", "got 'a100'", "cuda:a100"),
    "plan with a class": ("ab.plan(model, loss, torch.optim.SGD, (x, y))", "the class SGD", "optim.SGD("),
    "plan of no rows": ("ab.plan(model, loss, sgd, (x, y), rows=0)", "got 0", "Leave it out"),
}  # fmt: skip

COMMANDS: Mistakes = {
    "train lenet6": ("lenet6", "lenet5"),
    "train": ("Expected a recipe, got none", "package.module:function"),
    "train lenet5 --data no/such/folder": ("no/such/folder",),
    "train lenet5 --micro-batch 0": ("to be at least 1, got 0",),
    "train lenet5 --memory 100kB": ("above parameters, gradients", "got 97.7 KiB"),
    "train lenet5 --memory lots": ("got 'lots'", '"12GB"'),
    "train lenet5 --epochs 0": ("--epochs", "got 0"),
    "train lenet5 --validation 1.5": ("got 1.5",),
    "train lenet5 --lr -1": ("--lr", "got -1"),
    "train lenet5 --warm-up -1": ("--warm-up", "got -1"),
    "train lenet5 --resume nowhere": ("nowhere: expected the folder of a run", "Check the path"),
    f"train lenet5 --seed {'9' * 30}": ("--seed", "2**63"),
    "train lenet5 --device meta": ("got 'meta'", "Use cpu or auto"),
    "train lenet5 --patience 0": ("--patience to be at least 1, got 0",),
    "train lenet5 --patience 2": ("--patience to be given with --validation above 0, got 2",),
    "train lenet5 --ema nan": ("--ema to be from 0 to below 1, got nan",),
    "train lenet5 --keep -1": ("--keep to be at least 0, got -1",),
    "train lenet5 --save-minutes -1": ("--save-minutes to be at least 0, got -1.0",),
    "train lenet5 --workers 2": ("--servers with --workers", "--servers 1"),
    "train lenet5 --servers 0": ("--servers to be at least 1, got 0",),
    "train lenet5 --servers 1 --workers 0": ("Expected workers to be a whole number",),
    "train lenet5 --servers 1 --ranks 2": ("Expected --ranks to be 1 with --servers, got 2",),
    "train clip --norm whole": ("options of clip (--image-size), got --norm",),
    "train no.such:function": ("no.such", "package.module:function"),
    "train torch:nothing": ("'nothing'", "package.module:function"),
    "export nowhere.pt --out weights.pt": ("nowhere.pt: expected a checkpoint", "Check the path"),
    "check lenet5 --rows 1": ("--rows to be at least 2, got 1", "anybatch check --help"),
    "plan lenet5 --batch-size -3": ("--batch-size to be at least 1, got -3",),
    "plan lenet6": ("Expected a target, got 'lenet6'",),
    "eval nowhere.safetensors": ("nowhere.safetensors", "Check the path"),
    "eval notes.txt": ("notes.txt", "got a file"),
    "report nowhere": ("nowhere",),
}

MISTAKES = {
    **{f"batch: {name}": one for name, one in BATCHES.items()},
    **{f"loss: {name}": one for name, one in LOSSES.items()},
    **{f"page: {name}": one for name, one in TASKS.items()},
    **SETTINGS,
    **{f"anybatch {line}": (f"cli({line!r})", *words) for line, words in COMMANDS.items()},
}
