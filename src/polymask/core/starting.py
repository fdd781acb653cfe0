"""A new domain that begins where another one is, in place of at the base."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polymask.core.domain import START, Domain
from polymask.core.network import digest_tensors
from polymask.core.parts import Part
from polymask.errors import DomainError, MethodError


@torch.no_grad()
def begin_as(domain: Domain, other: Domain, rate: float) -> None:
    """Let a new domain begin where another is, with a head of its own; `rate` is that of its training.

    The other is in its stored form, and nothing is shared with it.
    """
    if not isinstance(other, Domain):
        raise DomainError(f"{str(other)[:100]!r} is no domain to begin as; pm.load_domain gives one")
    if other.fingerprint != domain.fingerprint:
        raise DomainError(
            f"the domain to begin as was made for base {other.base_name} (fingerprint {other.fingerprint[:12]}…), "
            f"this one for {domain.base_name} ({domain.fingerprint[:12]}…); take a domain of the same base"
        )
    mine, theirs = domain.method.name, other.method.name
    for method in (domain.method, other.method):
        if not method.learns_on:
            raise MethodError(f"{method.name} learns in stages or with other domains; begin by another method")
    own, norms = _norm_tensors(domain), _norm_tensors(other)
    if lacking := [name for name in norms if name not in own]:
        raise MethodError(
            f"{mine} with norms={domain.method.norms} has no {lacking[0]} of its own, and the domain to begin as "
            f"({theirs}) does; take norms={other.method.norms}"
        )
    parts, same = dict(other.named_parts()), replace(other.method, norms=domain.method.norms) == domain.method
    if parts.keys() != dict(domain.named_parts()).keys():
        raise MethodError(f"{mine} changes other layers than {theirs}, the domain to begin as; take one method")
    for place, part in domain.named_parts():
        try:
            if type(part).begin_as is Part.begin_as and not same:
                raise MethodError("it is by another method, or by other options of it; take the same")
            part.begin_as(parts[place], rate)
        except MethodError as error:
            raise MethodError(f"{mine} cannot begin as a domain by {theirs} ({place}): {error}") from error
    for name, tensor in norms.items():
        own[name].copy_(tensor)
    domain.recipe[START] = start_note(other)


def start_note(domain: Domain) -> dict[str, Any]:
    """What a domain notes that began as this one: its images, its method, and the sha256 of all that it stores."""
    stored = {name: t if isinstance(t, Tensor) else t.words for name, t in domain.stored().items()}
    return {"data": domain.recipe.get("data"), "method": domain.method.name, "digest": digest_tensors(stored)}


def _norm_tensors(domain: Domain) -> dict[str, Tensor]:
    """What a domain has of norms, by name."""
    return {f"{name}.{leaf}": tensor for name, norm in domain.named_norms() for leaf, tensor in norm.tensors().items()}
