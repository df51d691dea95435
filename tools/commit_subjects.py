"""Check that commit subjects are imperative, name one thing and have at most 72 characters.

python tools/commit_subjects.py .git/COMMIT_EDITMSG   # a message: the commit-msg hook
python tools/commit_subjects.py                       # all commits since the rule exists: CI
"""

import re
import subprocess
import sys
from pathlib import Path

LONGEST = 72  # characters
SINCE = "b770b20f"  # the last commit before this rule
# "Added", "Adding", "Adds" and articles, but not "Embed", "Bring" or "Pass".
NOT_IMPERATIVE = re.compile(r"(?!(?:Embed|Feed|Need|Seed|Shed|Speed|Bring|String|Ring)$)\w+(?:ed|ing)$|(?:A|An|The)$")


def faults(subject: str) -> list[str]:
    """Return what is wrong with a commit subject; empty if nothing is."""
    first = subject.split(" ", 1)[0]
    found = []
    if len(subject) > LONGEST:
        found.append(f"has {len(subject)} characters; use at most {LONGEST} and put the reason in the body")
    if ";" in subject:
        found.append("names several things; make one commit for each")
    if subject.endswith("."):
        found.append("ends with a full stop; leave it out")
    if not first[:1].isupper() or NOT_IMPERATIVE.match(first):
        found.append(f"begins with {first!r}; begin with a capitalised imperative verb, such as Add or Fix")
    return found


def new_subjects() -> list[str]:
    """Return the subjects of all commits since the rule exists, without merges.

    Empty in a shallow clone, which does not have the commit that the rule began with.
    """
    known = subprocess.run(["git", "cat-file", "-e", f"{SINCE}^{{commit}}"], capture_output=True, check=False)
    if known.returncode:
        print(f"commit subjects are not checked: this clone does not have {SINCE}")
        return []
    log = ["git", "log", "--no-merges", "--format=%s", f"{SINCE}..HEAD"]
    return subprocess.run(log, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> int:
    """Print each fault of each subject. Returns the exit status."""
    if len(sys.argv) > 1:
        subjects = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()[:1]
        subjects = [one for one in subjects if not one.startswith(("Merge ", "fixup! ", "squash! "))]
    else:
        subjects = new_subjects()
    bad = [f"{subject}\n  the subject {fault}" for subject in subjects for fault in faults(subject)]
    print("\n".join(bad) or f"{len(subjects)} commit subjects are fine")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
