"""The mesh: which ranks communicate with which, for the dense and for the expert part of a model (SPEC section 1).

Enters: sizes of axes and their order. Leaves: a checked `Mesh` and its groups of ranks. Needs no torch.

One world is cut twice. The dense part is tp·cp·dp·pp ranks, the expert part etp·ep·edp·pp; both have the same pipeline
groups, and within a stage the experts are folded over the ranks that cp and dp spread out.

A group is named by its axes, in any order: `tp-pp`, `dp-cp`. A name with ep, etp or edp is of the expert part, where tp
and dp stand for etp and edp: `tp-ep` is `etp-ep`. cp and the factors of cp and tp have no counterpart there, so that
`ep-cp` means nothing and is refused. `pp` alone and `tp-pp` are of the dense part. `embedding` are the first and the
last stage of each pipeline group.

Every axis of both parts is a set of *atoms* (`fxpar.mesh.axes`), where the two parts have a common refinement. Groups
are listed without one too; a plan needs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from fxpar.errors import PlanError, shown
from fxpar.mesh.axes import DENSE, EXPERT, NESTING, PURPOSES, Atom, Axes, Groups, refined

ORDER = "tp-cp-ep-dp-pp"
EMBEDDING = "embedding"

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")

# What an axis of the order string is called in the expert part.
_IN_EXPERTS = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}

_Problem = tuple[str, str, str]

MOST_RANKS = 2**17  # beyond any cluster there is only a slip of the keyboard


@dataclass(frozen=True)
class Mesh:
    """A world of ranks and how its axes are laid out in it.

    Attributes:
        tp: tensor parallel ranks.
        cp: context parallel ranks.
        dp: data parallel ranks, by default what tp, cp and pp leave of the world, or 1 where its size is not said.
        pp: pipeline parallel ranks, of both parts.
        ep: expert parallel ranks.
        etp: tensor parallel ranks within an expert, by default tp.
        world_size: all ranks, by default tp·cp·dp·pp.
        order: the axes from the fastest, whose neighbours are neighbouring ranks, to the slowest. Axes of size 1 may be
            left out. In the expert part etp stands in tp's place and edp in dp's.
        rank_offset: number of the first rank.
        virtual: stages of the pipeline that each rank holds; more than one needs pp > 1.
        hierarchical_cp: sizes of the levels of cp, from the fastest, groups cp1, cp2, …; their product is cp.
        dp_shard: of dp those neighbours that share out parameters, groups dp_in; the same ones are held by the groups
            dp_out. By default all of dp.
        kv_heads: key and value heads that tp splits, in groups kv_in and kv_out. Where they are fewer than tp, that is
            kv_in·kv_out, kv_in fast: kv_out ranks apart hold different heads, kv_in neighbours the same (SPEC section
            2.2). None leaves tp whole.

    Raises:
        PlanError: the sizes contradict each other; names the axis and the numbers that clash.
    """

    tp: int = 1
    cp: int = 1
    dp: int | None = None
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    world_size: int | None = None
    order: str = ORDER
    rank_offset: int = 0
    virtual: int = 1
    hierarchical_cp: tuple[int, ...] = ()
    kv_heads: int | None = None
    dp_shard: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.hierarchical_cp, list):
            object.__setattr__(self, "hierarchical_cp", tuple(self.hierarchical_cp))
        # A later stage may rely on what an earlier one found in order.
        for stage in (self._wrong_values, self._wrong_products, self._wrong_order, self._wrong_shards):
            problems = list(stage())
            if problems:
                axes, reasons, remedies = (dict.fromkeys(texts) for texts in zip(*problems, strict=True))
                raise PlanError("; ".join(reasons), where=", ".join(axes), remedy="; ".join(remedies))

    # ------------------------------------------------------------------ checks

    def _wrong_values(self) -> Iterator[_Problem]:
        counts = {name: getattr(self, name) for name in ("tp", "cp", "pp", "ep", "virtual")}
        maybe = {name: getattr(self, name) for name in ("dp", "etp", "world_size", "kv_heads", "dp_shard")}
        counts |= {name: value for name, value in maybe.items() if value is not None}
        if isinstance(self.hierarchical_cp, tuple):
            counts |= {f"hierarchical_cp[{level}]": size for level, size in enumerate(self.hierarchical_cp)}
        else:
            reason = f"hierarchical_cp must be a list of sizes, got {shown(self.hierarchical_cp)}"
            yield "cp", reason, "give the size of each level"
        for name, value in counts.items():
            if type(value) is not int or value < 1:
                yield name, f"{name} must be a positive integer, got {shown(value)}", "give a number of at least 1"
            elif value > MOST_RANKS:
                reason = f"{name} must be at most {MOST_RANKS}, got {shown(value)}"
                yield name.replace("_", " "), reason, "check the sizes of the axes"
        if type(self.rank_offset) is not int or not 0 <= self.rank_offset <= MOST_RANKS:
            reason = f"rank_offset must be the number of a rank, got {shown(self.rank_offset)}"
            yield "rank_offset", reason, f"give a number from 0 to {MOST_RANKS}"
        if isinstance(self.order, str):
            yield from self._wrong_words(self.order.split("-"))
        else:
            yield "order", f"order must be text, got {shown(self.order)}", f"write axes as in {ORDER!r}"

    def _wrong_words(self, words: list[str]) -> Iterator[_Problem]:
        known = ORDER.split("-")
        for word in dict.fromkeys(words):
            places = [place for place, other in enumerate(words, 1) if other == word]
            if word not in known:
                reason = f"the order {self.order!r} has the unknown axis {word!r} in place {places[0]}"
                yield "order", reason, f"choose from {', '.join(known)}"
            elif len(places) > 1:
                reason = f"the order {self.order!r} has {word} in places {' and '.join(map(str, places))}"
                yield word, reason, f"name {word} once"

    def _wrong_products(self) -> Iterator[_Problem]:
        if self._total > MOST_RANKS:
            yield "world size", f"{self._total} ranks are more than {MOST_RANKS}", "check the sizes of the axes"
        for left, axes in (("dp", ("tp", "cp", "pp")), ("edp", ("etp", "ep", "pp"))):
            sizes = [self._given(axis) for axis in axes]
            product, total = math.prod(sizes), self._total
            text = f"{'·'.join(axes)} = {'·'.join(map(str, sizes))} = {product}"
            if total % product:
                reason = f"the world size {total} is not a multiple of {text}, so that {left} is not a whole number"
                yield left, reason, f"change the world size or {', '.join(axes)}"
            elif left == "dp" and self.dp not in (None, total // product):
                reason = f"dp={self.dp} differs from the world size {total} / ({text}) = {total // product}"
                yield "dp", reason, f"leave dp out or give {total // product}"
        if self.virtual > 1 and self.pp == 1:
            reason = f"virtual={self.virtual} stages a rank need a pipeline, and pp={self.pp}"
            yield "pp", reason, "give pp of at least 2, or leave virtual=1"
        levels = math.prod(self.hierarchical_cp)
        if self.hierarchical_cp and levels != self.cp:
            sizes = list(self.hierarchical_cp)
            reason = f"cp={self.cp} differs from the product of its levels {'·'.join(map(str, sizes))} = {levels}"
            yield "cp", reason, "give levels whose product is cp"
        if self.kv_heads is not None and self.kv_heads % self.tp and self.tp % self.kv_heads:
            reason = f"neither of tp={self.tp} and {self.kv_heads} key and value heads divides the other"
            yield "tp", reason, "change tp: with this one, attention stays whole on every rank"

    def _wrong_shards(self) -> Iterator[_Problem]:
        if self.dp_shard is None:
            return
        shards, size, experts = self.dp_shard, self.sizes["dp"], self._data_ranks_of_experts
        if size % shards:
            reason = f"dp_shard={shards} does not divide dp={size}"
            yield "dp_shard", reason, f"give a divisor of {size}"
        elif 1 < shards < size and experts not in (1, size, shards):
            reason = f"dp_shard={shards} neighbours of dp share out parameters, and {experts} hold different experts"
            yield "dp_shard", reason, f"give {experts} or {size}"

    def _wrong_order(self) -> Iterator[_Problem]:
        words = self.order.split("-")
        for name in ORDER.split("-"):
            axes = dict.fromkeys((name, _IN_EXPERTS.get(name, name)))
            wide = [f"{axis}={self.sizes[axis]}" for axis in axes if self.sizes[axis] > 1]
            if name not in words and wide:
                reason = f"the order {self.order!r} lacks {name}, whose size is not 1: {', '.join(wide)}"
                yield name, reason, f"put {name} into the order"
        if self.pp == 1 or "pp" not in words:
            return
        if self.dense.groups(["pp"]) != self.expert.groups(["pp"]):
            dense, expert = self.dense.groups_text(["pp"]), self.expert.groups_text(["pp"])
            strides = (self.dense.stride_text("pp"), self.expert.stride_text("pp"))
            reason = (
                f"the pipeline groups of the dense part, {dense}, differ from those of the expert part, {expert}: with "
                f"the order {self.order!r} neighbours are {strides[0]} ranks apart in the one and {strides[1]} in the "
                "other"
            )
            yield "pp", reason, "put pp last in the order, or make the two products equal"

    # ------------------------------------------------------------------ sizes

    def _given(self, axis: str) -> int:
        """Returns an axis that is not derived."""
        name = "tp" if axis == "etp" and self.etp is None else axis
        return int(getattr(self, name))

    @property
    def _total(self) -> int:
        return self.world_size or self.tp * self.cp * (self.dp or 1) * self.pp

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Returns the size of every axis of the two parts, derived ones included."""
        sizes = {axis: self._given(axis) for axis in ("tp", "cp", "pp", "etp", "ep")}
        sizes["dp"] = self._total // (self.tp * self.cp * self.pp)
        sizes["edp"] = self._total // (sizes["etp"] * self.ep * self.pp)
        return {axis: sizes[axis] for axis in dict.fromkeys((*DENSE_AXES, *EXPERT_AXES))}

    @property
    def ranks(self) -> range:
        """Returns all ranks."""
        return range(self.rank_offset, self.rank_offset + self._total)

    # ------------------------------------------------------------------ parts

    def _ordered(self, of: Mapping[str, str]) -> Axes:
        words = self.order.split("-")
        words += [name for name in ORDER.split("-") if name not in words]  # of size 1: their place says nothing
        return Axes(tuple((of[name], self.sizes[of[name]]) for name in words if name in of), self.rank_offset)

    @cached_property
    def dense(self) -> Axes:
        """Returns the dense part: tp, cp, dp and pp in the order."""
        return self._ordered({axis: axis for axis in DENSE_AXES})

    @cached_property
    def expert(self) -> Axes:
        """Returns the expert part: etp, ep, edp and pp in the order."""
        return self._ordered(_IN_EXPERTS)

    @cached_property
    def factors(self) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """Returns names and sizes of the factors of dp, cp and tp, from the fastest; empty where these are whole.

        dp is dp_in·dp_out where some of its ranks, those of dp_in, hold different experts or shards, and others the
        same.
        """
        factors: dict[str, tuple[tuple[str, int], ...]] = {}
        inner = self._data_ranks_of_experts
        if self.dp_shard is not None and inner in (1, self.sizes["dp"]):
            inner = self.dp_shard
        if 1 < inner < self.sizes["dp"]:
            factors["dp"] = (("dp_in", inner), ("dp_out", self.sizes["dp"] // inner))
        if self.kv_heads is not None:
            different = math.gcd(self.kv_heads, self.tp)
            factors["tp"] = (("kv_in", self.tp // different), ("kv_out", different))
        if self.hierarchical_cp:
            factors["cp"] = tuple((f"cp{level}", size) for level, size in enumerate(self.hierarchical_cp, 1))
        return factors

    @property
    def _data_ranks_of_experts(self) -> int:
        """Returns how many neighbours on dp hold different experts; 1 where dp's ranks are no such neighbours."""
        size, start = self.sizes["dp"], self.dense.stride("dp")
        low, high = self.expert.stride("ep"), self.expert.stride("ep") * self.ep
        inner, rest = divmod(high, start)
        is_run = low <= start < high and not rest and size % inner == 0
        return min(inner, size) if is_run else 1

    @cached_property
    def _factored(self) -> Axes:
        axes = self.dense
        for axis, factors in self.factors.items():
            axes = axes.factored(axis, factors)
        return axes

    # ------------------------------------------------------------------ groups

    def part(self, name: str) -> str:
        """Returns `dense` or `expert`: the part whose axes the name of a group speaks of."""
        return EXPERT if set(name.split("-")) & {"etp", "ep", "edp"} else DENSE

    def groups(self, name: str) -> Groups:
        """Returns the groups of that name, ordered by their first ranks; ranks ascend.

        Of use are, besides the axes, `tp-pp` (the ranks of one copy of the model), `dp-cp` and `edp` (sum the gradients
        of dense and of expert parameters), and `embedding` (tied embeddings; holds one rank where pp is 1, and else
        leaves out the stages between).

        Raises:
            PlanError: the name has no meaning; the module's text says which names do.
        """
        if name == EMBEDDING:
            return tuple(tuple(dict.fromkeys((group[0], group[-1]))) for group in self.dense.groups(["pp"]))
        axes, names = self._named(name)
        return axes.groups(names)

    def _named(self, name: str) -> tuple[Axes, list[str]]:
        """Returns the part that the name of a group speaks of, and the axes that it names there."""
        words = name.split("-")
        if self.part(name) == EXPERT:
            axes, names = self.expert, [_IN_EXPERTS.get(word, word) for word in words]
        else:
            axes, names = self._factored, self._pieces(words)
        twice = next((axis for axis in names if names.count(axis) > 1), None)
        if twice is not None:
            raise PlanError(
                f"the group {name!r} has {twice} {names.count(twice)} times", where=twice, remedy="name each axis once"
            )
        missing = next((axis for axis in names if axis not in axes.names), None)
        if missing is not None:
            known = dict.fromkeys((*axes.names, *(self.factors if self.part(name) == DENSE else ())))
            raise PlanError(
                f"the group {name!r} has no meaning: {missing!r} is not an axis of the {self.part(name)} part",
                where=f"group {name}",
                remedy=f"combine axes of one part, here {', '.join(known)}",
            )
        return axes, names

    def _pieces(self, words: list[str]) -> list[str]:
        """Returns the axes, with the factors instead of factored ones."""
        return [piece for word in words for piece in dict(self.factors.get(word, ((word, 0),)))]

    # ------------------------------------------------------------------ atoms

    @cached_property
    def atoms(self) -> tuple[Atom, ...]:
        """Returns the common refinement of the dense part, with its factors, and the expert part, from the fastest.

        Raises:
            PlanError: there is none; names the two numbers of ranks of which neither divides the other.
        """
        return refined({DENSE: self._factored.sizes, EXPERT: self.expert.sizes})

    def atoms_of(self, name: str) -> tuple[Atom, ...]:
        """Returns the atoms of an axis, of a factor of one, or of joined axes, in nesting order: the outermost first.

        Joined axes nest as in `PURPOSES`, whatever their order in the name; of an axis the slowest atom is outermost,
        so that ascending ranks are neighbouring blocks. An axis of one rank has no atoms.

        Args:
            name: as `groups` takes it, `embedding` excepted.

        Raises:
            PlanError: the name has no meaning, or the parts have no common refinement.
        """
        axes, names = self._named(name)
        names = sorted(names, key=lambda axis: (_depth(self._axis_of(axis)), -axes.stride(axis)))
        spans = [range(axes.stride(axis), axes.stride(axis) * dict(axes.sizes)[axis]) for axis in names]
        return tuple(atom for span in spans for atom in reversed(self.atoms) if atom.stride in span)

    def _axis_of(self, name: str) -> str:
        """Returns the axis whose factor it is; an axis is its own."""
        return next((axis for axis, factors in self.factors.items() if name in dict(factors)), name)

    def nested(self, part: str) -> dict[str, int]:
        """Returns sizes of the axes of more than one rank that may stand in a layout of a part, in nesting order.

        dp stands there as its factors, where it has some.

        Args:
            part: `dense` or `expert`.
        """
        sizes: dict[str, int] = {}
        for axis in NESTING[part]:
            factors = self.factors.get(axis, ()) if axis == "dp" else ()
            sizes |= dict(reversed(factors)) or {axis: self.sizes.get(axis, 1)}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @cached_property
    def holders(self) -> dict[str, int]:
        """Returns of the dense part's axes those that hold different experts, with their sizes, in nesting order.

        Raises:
            PlanError: the ranks that hold different experts are no whole axes of the dense part.
        """
        if self.ep == 1:
            return {}
        atoms, holders = self.atoms_of("ep"), dict[str, int]()
        for axis, size in self.nested(DENSE).items():
            axis_atoms = self.atoms_of(axis)
            if set(axis_atoms) <= set(atoms):
                holders[axis] = size
            elif set(axis_atoms) & set(atoms):
                raise PlanError(
                    f"ep={self.ep} with etp={self.sizes['etp']} divides the {size} ranks of {axis}: some of them hold "
                    "different experts and others parts of one",
                    where="ep, etp",
                    remedy=f"give etp=1 and an ep that {axis}={size} divides, or etp={self.sizes['tp']}",
                )
        return holders

    def sharing(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Returns the first two axes with an atom in common, which never stand in one layout; None without such.

        Raises:
            PlanError: a name has no meaning, or the parts have no common refinement.
        """
        pairs = combinations(names, 2)
        return next((pair for pair in pairs if set(self.atoms_of(pair[0])) & set(self.atoms_of(pair[1]))), None)

    # ------------------------------------------------------------------ ranks

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the rank's index on every axis of both parts, factors included.

        Raises:
            PlanError: there is no such rank.
        """
        parts = (self.dense, self._factored, self.expert)
        return {axis: index for axes in parts for axis, index in axes.coordinates(rank).items()}

    def stages(self, rank: int) -> tuple[int, ...]:
        """Returns the pipeline stages that the rank holds: its c-th is c·pp + its index on pp (SPEC section 3).

        Raises:
            PlanError: there is no such rank.
        """
        index = self.dense.coordinates(rank)["pp"]
        return tuple(chunk * self.pp + index for chunk in range(self.virtual))


def _depth(axis: str) -> int:
    """Returns the place of an axis in nesting order."""
    return list(PURPOSES).index(axis)
