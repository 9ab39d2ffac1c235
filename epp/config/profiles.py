"""`schedulingProfiles`: which filters, scorers and picker run together, with llm-d's defaults filled in.

The order of entries means nothing except among filters; a weight belongs to a scorer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epp.config.document import ProfileEntry, ProfilePlugin
from epp.config.errors import Findings
from epp.config.plan import Plan, Planned
from epp.config.roles import IN_PROFILES, Role

DEFAULT_PICKER = "max-score-picker"
DEFAULT_HANDLER = "single-profile-handler"


@dataclass(slots=True)
class PlannedProfile:
    name: str
    path: str
    filters: list[Planned] = field(default_factory=list)
    scorers: list[tuple[Planned, float]] = field(default_factory=list)
    pickers: list[Planned] = field(default_factory=list)


def plan_profiles(entries: Sequence[ProfileEntry], plan: Plan, findings: Findings) -> list[PlannedProfile]:
    """No entries: one profile "default" with everything that can be in a profile."""
    if not entries:
        usable = [p.name for p in plan if any(p.has_role(role) for role in IN_PROFILES)]
        entries = [ProfileEntry(name="default", plugins=[ProfilePlugin(plugin_ref=name) for name in usable])]
    profiles = [_plan_profile(entry, f"schedulingProfiles[{i}]", plan, findings) for i, entry in enumerate(entries)]
    _check_names(profiles, findings)
    for profile in profiles:
        _ensure_picker(profile, plan)
    return profiles


def plan_handler(profiles: Sequence[PlannedProfile], plan: Plan, findings: Findings) -> Planned | None:
    handlers = plan.with_role(Role.HANDLER)
    if not handlers and len(profiles) == 1:
        return plan.add_default(DEFAULT_HANDLER, "no profile handler is configured")
    if not handlers:
        if plan.is_complete:  # else the handler may be the entry that is wrong
            findings.error("plugins", "several profiles need a profile handler")
        return None
    if len(handlers) > 1:
        findings.error("plugins", f"multiple profile handlers found: {', '.join(h.name for h in handlers)}")
    elif handlers[0].kind.type == DEFAULT_HANDLER and len(profiles) > 1:
        findings.error("schedulingProfiles", f"{DEFAULT_HANDLER} runs one profile, and {len(profiles)} are configured")
    return handlers[0]


def _plan_profile(entry: ProfileEntry, path: str, plan: Plan, findings: Findings) -> PlannedProfile:
    profile = PlannedProfile(entry.name, path)
    seen: set[str] = set()
    for position, reference in enumerate(entry.plugins):
        where = f"{path}.plugins[{position}]"
        planned = plan.resolve(reference.plugin_ref, f"{where}.pluginRef")
        if reference.plugin_ref in seen:
            findings.error(f"{where}.pluginRef", f'"{reference.plugin_ref}" is listed twice')
        elif planned is not None:
            _place(profile, planned, reference.weight, where, findings)
        seen.add(reference.plugin_ref)
    if len(profile.pickers) > 1:
        findings.error(f"{path}.plugins", f"more than one picker: {', '.join(p.name for p in profile.pickers)}")
    return profile


def _place(profile: PlannedProfile, planned: Planned, weight: float | None, where: str, findings: Findings) -> None:
    if not any(planned.has_role(role) for role in IN_PROFILES):
        findings.error(f"{where}.pluginRef", f'"{planned.name}" is neither a filter, a scorer nor a picker')
    if planned.has_role(Role.FILTER):
        profile.filters.append(planned)
    if planned.has_role(Role.PICKER):
        profile.pickers.append(planned)
    if planned.has_role(Role.SCORER):
        profile.scorers.append((planned, 1.0 if weight is None else weight))
    elif weight is not None:
        findings.warn(f"{where}.weight", f'"{planned.name}" is not a scorer; the weight has no effect')


def _check_names(profiles: Sequence[PlannedProfile], findings: Findings) -> None:
    seen: set[str] = set()
    for profile in profiles:
        if not profile.name:
            findings.error(f"{profile.path}.name", "required, but missing")
        elif profile.name in seen:
            findings.error(f"{profile.path}.name", f'"{profile.name}" is the name of two profiles')
        seen.add(profile.name)


def _ensure_picker(profile: PlannedProfile, plan: Plan) -> None:
    if not profile.pickers:
        known = plan.with_role(Role.PICKER)
        profile.pickers.append(known[0] if known else plan.add_default(DEFAULT_PICKER, "no picker is configured"))
