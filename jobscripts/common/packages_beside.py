"""Let a virtual environment see the packages of the Python that runs this, which may itself be in another one.

    python3 packages_beside.py ENVIRONMENT

`python3 -m venv --system-site-packages` from within a virtual environment gives the packages of the system below both,
not those of the first one. A line of site's in ENVIRONMENT adds their folder, after the environment's own.
"""

import glob
import sys
import sysconfig

NAME = "packages_beside.pth"


def see_beside(environment: str) -> None:
    """Write the line. Raises ValueError where `environment` has not exactly one folder of packages."""
    (folder,) = glob.glob(f"{glob.escape(environment)}/lib/python3*/site-packages")
    with open(f"{folder}/{NAME}", "w", encoding="utf-8") as file:
        file.write(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")


if __name__ == "__main__":
    see_beside(sys.argv[1])
