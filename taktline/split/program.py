"""The steps of a stage as a Python function: nothing is looked up that is known before."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from taktline.split import run_steps
from taktline.split.cut import StagePlan
from taktline.split.kinds import Absent
from taktline.split.nested import Node, Object, at_path, children_of, parts_in
from taktline.split.steps import Extra, Kind, Modes, Record, Region, State, Step, Value

_INDENT = "    "
_numbers = count()


_HELPERS = (checkpoint, at_path, Object, *(run_steps.__dict__[name] for name in (
    "attribute", "captured", "check_type", "differs", "require_same", "tensor_of")))  # fmt: skip
_NAMES = {"torch": torch} | {each.__name__: each for each in _HELPERS}


class Given(NamedTuple):
    """An argument of the model, as the stage has got it."""

    number: int


def replaced(template: Any, change: Callable[[Value], Any]) -> Any:
    """A template with other parts in the places of values."""
    kind = type(template)
    if kind is Value:
        return change(template)
    if kind is tuple or kind is list:
        return kind([replaced(part, change) for part in template])
    if kind is dict:
        return {key: replaced(part, change) for key, part in template.items()}
    if kind is Node:
        return Node(template.spec, replaced(template.parts, change))
    if kind is Object:
        return Object(template.kind, replaced(template.attributes, change))
    return template


class Writer:
    """Writes the function of a stage."""

    def __init__(self, record: Record, *, checks: bool = False) -> None:
        self.record, self.checks = record, checks
        self.constants: dict[str, Any] = dict(_NAMES)
        self.lines: list[str] = []
        self.last: dict[Value, Step] = {}
        """The last step that uses each value that is not returned."""
        self.depth = 1
        self.modes = record.modes

    def write(self, line: str) -> None:
        """Add a line."""
        self.lines.append(_INDENT * self.depth + line)

    def constant(self, value: Any, name: str = "c") -> str:
        """The name of a constant."""
        name = f"{name}{len(self.constants)}"
        self.constants[name] = value
        return name

    def text(self, part: Any) -> str:
        """The expression for a nested value."""
        kind = type(part)
        if kind is Value:
            return f"v{part.number}"
        if kind is Given:
            return f"g{part.number}"
        if kind is State:
            return f"tensor_of(s, {', '.join(map(repr, self.record.aliases[part.name]))})"
        if part is None or kind in (bool, int, str) or part is Ellipsis:
            return repr(part)
        if kind is tuple and not any(parts_in(part, kind) for kind in (Value, State, Given)):
            return self.constant(part) if _is_fixed(part) else self.items(part)
        if kind is tuple:
            return self.items(part)
        if kind is list:
            return self.items(part, "[", "]")
        if kind is dict:
            inside = ", ".join(
                f"{key!r}: {self.text(v)}" if type(key) in (str, int)
                else f"{self.constant(key)}: {self.text(v)}" for key, v in part.items()
            )  # fmt: skip
            return f"{{{inside}}}"
        if kind is slice and parts_in(part, Value):
            return f"slice({self.text(part.start)}, {self.text(part.stop)}, {self.text(part.step)})"
        if kind is Object:
            return f"Object({self.constant(part.kind)}, {self.text(part.attributes)}).build()"
        if kind is Node:
            spec = self.constant(Node(part.spec, []))
            return f"{spec}._replace(parts={self.text(part.parts)}).build()"
        return self.constant(part)

    def handed_on(self, part: Any, rest: frozenset[Value]) -> str:
        """The expression for arguments of the model as the next stage gets them."""
        record = self.record

        def changed(value: Value) -> Any:
            return Given(value.number) if value in rest else Absent(*record.metas[value])

        return self.text(replaced(part, changed))

    def items(self, parts: Sequence[Any], start: str = "(", end: str = ",)") -> str:
        """The expression for a tuple or list."""
        return f"{start}{', '.join(map(self.text, parts))}{end if parts else end[-1]}"

    def steps(self, steps: Sequence[Step], wanted: set[Value], outer: int = 0) -> None:
        """Write steps; ``wanted`` are the values that are used after them."""
        at = 0
        while at < len(steps):
            step = steps[at]
            if len(step.region) > outer:
                region = step.region[outer]
                end = at
                while end < len(steps) and steps[end].region[outer : outer + 1] == (region,):
                    end += 1
                later = wanted.union(*(later.reads for later in steps[end:]))
                self._region(region, steps[at:end], later, outer + 1)
                if not outer:
                    self._free(steps[at:end])
                at = end
                continue
            end = at + 1
            while (
                end < len(steps)
                and steps[end].modes == step.modes
                and len(steps[end].region) == outer
            ):
                end += 1
            self.in_modes(step.modes, steps[at:end])
            at = end

    def in_modes(self, modes: Modes, steps: Sequence[Step]) -> None:
        """Write steps that run in the same modes."""
        depth, before = self.depth, self.modes
        if modes.grad != before.grad:
            self.write(f"with torch.set_grad_enabled({modes.grad}):")
            self.depth += 1
        for (device, dtype), (_, outer) in zip(modes.autocast, before.autocast, strict=True):
            if dtype != outer:
                kind = f"dtype={dtype}" if dtype is not None else "enabled=False"
                self.write(f"with torch.autocast({device!r}, {kind}):")
                self.depth += 1
        self.modes = modes
        for step in steps:
            self._step(step)
            if not step.region:
                self._free([step])
        self.modes, self.depth = before, depth

    def _free(self, steps: Sequence[Step]) -> None:
        """Let go of values that no later step uses."""
        held = {value for step in steps for value in (*step.reads, *step.makes)}
        done = sorted(value for value in held if self.last.get(value) in steps)
        if done:
            self.write(f"{' = '.join(map(self.text, done))} = None")

    def _region(self, region: Region, steps: Sequence[Step], later: set[Value], outer: int) -> None:
        """Write a checkpointed part as a function that is called through ``checkpoint``."""
        made = {value: None for step in steps for value in step.makes}
        needs = {value: None for step in steps for value in step.reads if value not in made}
        returned = [value for value in made if value in later]
        name = f"region{len(self.lines)}"
        names = ", ".join(map(self.text, needs))
        self.write(f"def {name}({names}):")
        self.depth += 1
        self.steps(steps, later, outer)
        self.write(f"return {self.items(returned)}")
        self.depth -= 1
        target = f"{self.items(returned)} = " if returned else ""
        arguments = f"{name}, {names}, " if names else f"{name}, "
        keywords = f"use_reentrant=False, preserve_rng_state={region.preserves_rng}"
        self.write(f"{target}checkpoint({arguments}{keywords})")

    def _step(self, step: Step) -> None:
        args = [self.text(arg) for arg in step.args]
        kwargs = [
            f"{key}={self.text(v)}" if key.isidentifier() else f"**{{{key!r}: {self.text(v)}}}"
            for key, v in step.kwargs.items()
        ]
        if step.kind is Kind.READ:
            call = f"{self.constant(step.target, 'f')}({', '.join([*args, *kwargs])})"
            expected = self.constant(step.output)
            self.write(f"require_same({call}, {expected}, {step.line!r})")
            return
        if step.kind is Kind.CALL:
            target = self.constant(step.target, "f")
        else:
            target = unit_text(step.target)
        in_arguments = [extra for extra in step.extras if extra.where == "arguments"]
        inside = [extra for extra in step.extras if extra.where == "inside"]
        if in_arguments:
            name = f"a{len(self.lines)}"
            keywords = "{" + ", ".join(f"{k!r}: {self.text(v)}" for k, v in step.kwargs.items())
            self.write(f"{name} = ({', '.join(args)}{',' if args else ''}), {keywords}}}")
            arguments = f"*{name}[0], **{name}[1]"
        else:
            name, arguments = "", ", ".join([*args, *kwargs])
        if inside:
            places = self.constant([(e.module, e.call, e.path) for e in inside])
            caught = self.items([e.value for e in inside])
            self._assign(step, f"captured({target}, {places}, {arguments})", f"{caught}, ")
        else:
            self._assign(step, f"{target}({arguments})", "")
        for extra in in_arguments:
            self.write(f"{self.text(extra.value)} = at_path({name}, {self.constant(extra.path)})")
        for extra in step.extras:
            if extra.where == "attribute":
                self._attribute(target, extra)
        if self.checks and step.kind is Kind.UNIT:
            self.check(step.makes)

    def check(self, values: Sequence[Value]) -> None:
        """Write a comparison of the types of values with those that were recorded."""
        for value in values:
            dtype = self.record.metas[value][1]
            if dtype.is_floating_point:
                self.write(f"check_type(v{value.number}, {dtype})")

    def _attribute(self, target: str, extra: Extra) -> None:
        path = self.constant(extra.path)
        self.write(f"{self.text(extra.value)} = attribute({target}, {extra.module!r}, {path})")

    def _assign(self, step: Step, call: str, before: str) -> None:
        """Write a call, and put the tensors of its output into variables."""
        output: Any = () if isinstance(step.output, State) else step.output
        if isinstance(output, Value):
            self.write(f"{before}{self.text(output)} = {call}")
        elif not parts_in(output, Value):
            self.write(f"{before}_ = {call}" if before else call)
        elif type(output) in (tuple, list) and all(type(part) is Value for part in output):
            self.write(f"{before}{self.items(output)} = {call}")
        else:
            name = f"o{len(self.lines)}"
            self.write(f"{before}{name} = {call}")
            for path, value in _places(output):
                self.write(f"{self.text(value)} = at_path({name}, {self.constant(path)})")

    def compiled(self, head: str, arguments: Sequence[str]) -> Callable[..., Any]:
        """The function."""
        text = "\n".join([f"def {head}({', '.join(arguments)}):", *self.lines, ""])
        name = f"<{head} {next(_numbers)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        names = dict(self.constants)
        exec(compile(text, name, "exec"), names)
        made = names[head]
        made.text = text
        return made


def _is_fixed(part: Any) -> bool:
    """Whether a tuple has no lists or dicts in it, which a call may change."""
    if type(part) is tuple:
        return all(map(_is_fixed, part))
    return not isinstance(part, (list, dict))


def unit_text(name: str) -> str:
    """The expression for a unit in the stage ``s``."""
    return "s" + "".join(f"._modules[{key!r}]" for key in name.split("."))


def _places(template: Any, path: Any = ()) -> list[tuple[Any, Value]]:
    """The values of an output with their paths in it."""
    if type(template) is Value:
        return [(path, template)]
    if isinstance(template, Node):
        # As the paths of its parts are those of the container itself.
        filled = template.build()
        return [
            place
            for key, part in children_of(filled) or ()
            for place in _places(part, (*path, key))
        ]
    if isinstance(template, Object):
        pairs = [(("attribute", key), part) for key, part in template.attributes.items()]
    elif isinstance(template, dict):
        pairs = [(("item", key), part) for key, part in template.items()]
    elif isinstance(template, (tuple, list)) and type(template) is not State:
        pairs = [(("item", at), part) for at, part in enumerate(template)]
    else:
        return []
    return [place for key, part in pairs for place in _places(part, (*path, key))]


def write_stage(
    record: Record, plan: StagePlan, rest: frozenset[Value] | None, *, checks: bool = False
) -> Callable[..., Any]:
    """The function of a stage, of the stage's module, received values and arguments.

    ``rest`` are the arguments that later stages need; None for the last stage. With ``checks`` it
    raises :class:`OtherTypes` if a unit returns another type than it did in the record.
    """
    writer = Writer(record, checks=checks)
    _begin(writer, plan, plan.received)
    if checks:
        writer.check(plan.received)
    wanted = set(plan.sent) | (set(parts_in(record.result, Value)) if rest is None else set())
    uses = ((value, step) for step in plan.steps for value in (*step.reads, *step.makes))
    writer.last = {value: step for value, step in uses if value not in wanted}
    writer.steps(plan.steps, wanted)
    if rest is None:
        sent = writer.text(record.result)
    else:
        args, kwargs = (writer.handed_on(part, rest) for part in record.given)
        sent = f"{writer.items(plan.sent)}, {args}, {kwargs}"
    writer.write(f"return {sent}")
    return writer.compiled("stage", ["s", "received", "arguments"])


def write_guards(record: Record, plan: StagePlan) -> Callable[..., Any] | None:
    """The function that raises :class:`Differs` if what the forward reads has changed."""
    if not plan.guards:
        return None
    writer = Writer(record)
    _begin(writer, plan, ())
    for step in plan.guards:
        if step.kind is Kind.READ:
            args = ", ".join(map(writer.text, step.args))
            rest = "".join(f", {key}={writer.text(v)}" for key, v in step.kwargs.items())
            call = f"{writer.constant(step.target, 'f')}({args}{rest})"
            writer.in_modes(step.modes, ())
            writer.write(f"differs({call}, {writer.constant(step.output)})")
        else:
            writer.in_modes(step.modes, [step])
    writer.write("return")
    return writer.compiled("guards", ["s", "received", "arguments"])


def _begin(writer: Writer, plan: StagePlan, received: Sequence[Value]) -> None:
    """Give variables to what the stage gets, and copy what it changes in place."""
    if received:
        writer.write(f"{writer.items(received)} = received")
    for place, value in enumerate(parts_in(writer.record.given, Value)):
        if value in plan.arguments or (value in plan.first and not received):
            writer.write(f"v{value.number} = g{value.number} = arguments[{place}]")
    for value in sorted(plan.copied):
        if value in received or value in plan.arguments or value in plan.first:
            writer.write(f"v{value.number} = v{value.number}.clone()")
