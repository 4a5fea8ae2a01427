# SPDX-License-Identifier: MIT
"""ABC by the authors' rules with single changes: python -m results.changes CHANGES OPTION...

CHANGES are names joined by +, options those of lengen.py.
start: what has no line sees the start token, not everything
vertical: cross-attention has verticals, too
self: kappa is 4.5 in self-attention, too"""

import sys

import lengen as L

def see_the_start():
    fill_empty = L.fill_empty
    L.fill_empty = lambda bias, rules: fill_empty(bias, "ours")

def search_verticals():
    L.RULES["code"]["directions"] = (-1, 0)

def raise_kappa():
    L.SELF_RULES["code"]["kappa"] = L.RULES["code"]["kappa"]

CHANGES = {"start": see_the_start, "vertical": search_verticals, "self": raise_kappa}

def main(argv):
    names = argv[0].split("+") if argv else []
    if not names or not set(names) <= set(CHANGES):
        print(f"changes: the first argument joins some of {', '.join(CHANGES)} by +",
              file=sys.stderr)
        return 2
    for name in names:
        CHANGES[name]()
    make_record = L.make_record

    def with_changes(run):
        return make_record(run) | dict(changed=argv[0])

    L.make_record = with_changes
    return L.main([*argv[1:], "--rules", "code"])

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
