"""Carry out docs/deployment.md literally, with three network namespaces as three hosts. Linux, as root; it cleans up.

    python benchmarks/hosts.py ENVIRONMENT     # a virtual environment in which metabayfl[flower] is installed

Instead of the first block the environment is mounted at /opt/metabayfl; services are started by their ExecStart lines.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

GUIDE = Path(__file__).parents[1] / "docs" / "deployment.md"
HOSTS = {"server": "10.77.0.1", "node0": "10.77.0.2", "node1": "10.77.0.3"}
BRIDGE = "mbf-bridge"
PLACES = ("/opt/metabayfl", "/etc/metabayfl", "/var/lib/metabayfl")


def shell(text: str, check: bool = True) -> None:
    """Run a line of shell."""
    subprocess.run(["sh", "-ec", text], check=check)  # noqa: S603, S607 (our own lines)


def blocks() -> dict[str, str]:
    """Return the guide's code blocks by the comment on their first line."""
    found = re.findall(r"```(?:sh|ini|toml)\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    named = {block.splitlines()[0].removeprefix("# "): block for block in found if block.startswith("# ")}
    return named | {"config": next(block for block in found if block.startswith("rounds"))}


def enter(host: str, root: Path, environment: str, text: str) -> list[str]:
    """Return a command that runs a line of shell as on a host: its network, its /etc/metabayfl, its users."""
    own = root / host
    mounts = [f"mount --bind {environment} /opt/metabayfl"]
    mounts += [f"mount --bind {own}{place} {place}" for place in PLACES[1:]]
    mounts += [f"mount --bind {own}/etc/{file} /etc/{file}" for file in ("hosts", "passwd", "group")]
    inside = " && ".join([*mounts, f"exec sh -ec {shlex.quote(text)}"])
    return ["ip", "netns", "exec", f"mbf-{host}", "unshare", "--mount", "sh", "-ec", inside]


def make_hosts(root: Path, user: int) -> None:
    """Make namespaces on a bridge, and what each host has of its own."""
    shell(f"ip link add {BRIDGE} type bridge && ip link set {BRIDGE} up")
    for place in PLACES:
        Path(place).mkdir(exist_ok=False)
    for number, (host, address) in enumerate(HOSTS.items()):
        shell(f"ip netns add mbf-{host}")
        shell(f"ip link add mbf{number} type veth peer name eth0 netns mbf-{host}")
        shell(f"ip link set mbf{number} master {BRIDGE} up")
        inside = f"ip netns exec mbf-{host} ip"
        shell(f"{inside} addr add {address}/24 dev eth0; {inside} link set eth0 up; {inside} link set lo up")
        for place in PLACES[1:]:
            (root / host / place[1:]).mkdir(parents=True)
        etc = root / host / "etc"
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{HOSTS['server']} server.example\n")
        for file, line in (
            ("passwd", f"metabayfl:x:{user}:{user}::/var/lib/metabayfl:/bin/sh"),
            ("group", f"metabayfl:x:{user}:"),
        ):
            (etc / file).write_text(Path("/etc", file).read_text() + line + "\n")
        shutil.chown(root / host / "var/lib/metabayfl", user, user)


def remove_hosts() -> None:
    """Undo `make_hosts`."""
    for host in HOSTS:
        shell(f"ip netns pids mbf-{host} | xargs -r kill -9; ip netns del mbf-{host}", check=False)
    shell(f"ip link del {BRIDGE}", check=False)
    for place in PLACES:
        Path(place).rmdir()


def service(unit: str, user: int, number: int) -> str:
    """Return what systemd would do with a unit: its user, environment, directory, and its command again and again."""
    (command,) = re.findall(r"ExecStart=(.*)", unit)
    command = command.replace("client-id=0", f"client-id={number}")
    again = f"set -a; . /etc/metabayfl/environment; cd /var/lib/metabayfl; while :; do {command} || true; sleep 5; done"
    return f"exec {become(user)} sh -c {shlex.quote(again)}"


def become(user: int) -> str:
    """Return the start of a command that runs as a user."""
    return f"setpriv --reuid {user} --regid {user} --clear-groups"


def usable_by(environment: str) -> int:
    """Return the number of the user metabayfl; root's if the Python of the environment lies where only root can go."""
    probe = f"{become(990)} sh -c '{environment}/bin/metabayfl --version'"
    done = subprocess.run(["sh", "-c", probe], capture_output=True, check=False)  # noqa: S603, S607 (our own line)
    return 990 if done.returncode == 0 else 0


def follow_guide(root: Path, environment: str, user: int) -> None:
    """Do what the guide says, step by step."""
    guide = blocks()

    def on(host: str, text: str) -> None:
        subprocess.run(enter(host, root, environment, text), check=True)  # noqa: S603 (our own lines)

    def begin(host: str, unit: str, number: int = 0) -> None:
        with (root / f"{host}-{len(list(root.glob('*.log')))}.log").open("wb") as log:
            words = enter(host, root, environment, service(unit, user, number))
            subprocess.Popen(words, stdout=log, stderr=log)  # noqa: S603 (our own lines)

    on("server", guide["server"])
    for number, host in enumerate(("node0", "node1")):
        on(host, guide["every node"])
        shutil.copy(root / "server/etc/metabayfl/ca.pem", root / host / "etc/metabayfl")
        shutil.copy(root / host / "etc/metabayfl/node.pub", root / f"server/etc/metabayfl/node{number}.pub")
        rng = np.random.default_rng(number)
        x = rng.normal(size=(60, 4)).astype(np.float32)
        np.savez(root / host / "var/lib/metabayfl/own.npz", x=x, y=x[:, :3].argmax(1))
    for host in HOSTS:
        (root / host / "etc/metabayfl/environment").write_text(guide["every host: /etc/metabayfl/environment"])
    for name in ("superlink", "superexec"):
        begin("server", guide[f"server: /etc/systemd/system/metabayfl-{name}.service"])
    (root / "server/var/lib/metabayfl/run.toml").write_text(guide["config"].replace("rounds = 20", "rounds = 3"))
    for number, host in enumerate(("node0", "node1")):
        begin(host, guide["node 0: /etc/systemd/system/metabayfl-node.service"], number)
    time.sleep(20)  # as long as an operator needs to type the next lines
    lines = guide["server, as the user metabayfl, in /var/lib/metabayfl"]
    text = f"set -a; . /etc/metabayfl/environment; cd /var/lib/metabayfl\n{lines}"
    on("server", f"exec {become(user)} sh -ec {shlex.quote(text)}")


def main() -> None:
    """Follow the guide in a place that is thrown away."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    environment = sys.argv[1]
    user = usable_by(environment)
    with tempfile.TemporaryDirectory(prefix="metabayfl-hosts-") as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        try:
            make_hosts(root, user)
            follow_guide(root, environment, user)
            own = sorted(
                str(path.relative_to(root)) for path in root.glob("node*/var/lib/metabayfl/state/*/personal/*")
            )
            print("personal models on the nodes:", *own, sep="\n")
        except subprocess.CalledProcessError:
            for log in sorted(root.glob("*.log")):
                print(log.name, *log.read_text(errors="replace").splitlines()[-12:], sep="\n")
            raise
        finally:
            remove_hosts()


if __name__ == "__main__":
    main()
