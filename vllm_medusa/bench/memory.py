"""How much memory an engine has held at most, read from Linux's /proc."""

from pathlib import Path

PROC = Path("/proc")


def peaks_of_session(session: int, proc: Path = PROC) -> dict[str, float]:
    """Peak resident size in MiB of each living process of a session, by a short name; empty where there is no /proc.

    Peaks are each process's own (`VmHWM`). Their sum counts a page that two processes share twice, and the peaks need
    not fall together: a fair figure between engines of the same shape, an upper bound of what one takes.
    """
    peaks: dict[str, float] = {}
    for folder in sorted(proc.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            if _session(folder) != session:
                continue
            status = (folder / "status").read_text()
            name = _name(folder, int(folder.name) == session)
        except OSError:  # it ended while we looked
            continue
        lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
        if lines:
            peaks[name] = peaks.get(name, 0.0) + round(int(lines[0][1]) / 1024, 1)
    return peaks


def _session(folder: Path) -> int:
    """The session id, field 6 of `stat`; the name in field 2 may hold blanks and ends with the last bracket."""
    return int((folder / "stat").read_text().rpartition(")")[2].split()[3])


def _name(folder: Path, leads: bool) -> str:
    """What vLLM calls its process, without "VLLM::"; the one that leads the session is the front end."""
    if leads:
        return "front end"
    title = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    return title.removeprefix("VLLM::") if title.startswith("VLLM::") else "helpers"
