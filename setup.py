"""Builds the native CPU library, and the module of the hooks. Metadata is in pyproject.toml.

The GPU kernels are compiled at run time, so the package holds their source. The library uses torch's stable ABI only:
one build serves torch 2.11 and newer. The module uses Python's: one build serves Python 3.10 and newer. A machine
without a C++ compiler still installs: the PyTorch reference then does the library's work, and says so at run time, and
what the module recognises by a few looks takes many.
"""

import os
import platform
import runpy
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# TORCH_TARGET_VERSION for 2.11, see torch/csrc/stable/version.h.
STABLE_ABI = 0x020B000000000000
# No contraction to fused multiply-adds and no fast-math: the kernels give the bits of the reference. -fno-math-errno
# and -fno-trapping-math change no value, they let rounding and fma() become one instruction.
COMMON_FLAGS = [
    "-O3",
    "-g0",  # Python's own flags may ask for debug information, which is six times the code
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",  # vectors are passed within a file only
]
ISA_FLAGS = {
    "kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512.cpp": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx512bf16",
        "-mfma",
        "-mprefer-vector-width=512",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ],
}


class BuildNative(build_ext):
    """build_ext that gives each source file its own flags: the instruction set is chosen at run time."""

    def get_ext_filename(self, fullname: str) -> str:
        # Neither depends on a version of Python.
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, extension: Extension) -> None:
        from torch.utils import cpp_extension

        last_flags = os.environ.get("GACT_DIST_LAST_CXXFLAGS", "").split()  # win over those before them
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        sources = runpy.run_path("gact_dist/_sources.py")["fingerprint"](Path("csrc"))
        macros = [("TORCH_TARGET_VERSION", f"{STABLE_ABI:#018x}"), ("GACT_DIST_SOURCES", f'"{sources}"')]
        objects = []
        for source in extension.sources:
            isa_flags = ISA_FLAGS.get(Path(source).name, []) if is_x86 else []
            objects += self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=macros,
                include_dirs=["csrc", sysconfig.get_path("include"), *cpp_extension.include_paths()],
                extra_postargs=COMMON_FLAGS + isa_flags + last_flags,
                depends=extension.depends,
            )
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(extension.name),
            libraries=extension.libraries,
            library_dirs=cpp_extension.library_paths(),
            target_lang="c++",
        )


class BuildPython(build_py):
    """build_py that copies the source of the GPU kernels into the package; an editable install reads it from csrc/."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in ("common", "cuda"):
            target = Path(self.build_lib) / "gact_dist" / "csrc" / folder
            self.mkpath(str(target))
            for source in sorted(Path("csrc", folder).iterdir()):
                self.copy_file(str(source), str(target / source.name))


class PlatformWheel(bdist_wheel):
    """bdist_wheel for every version of Python from 3.10 on: torch's ABI and Python's are stable."""

    def get_tag(self) -> tuple[str, str, str]:
        return "cp310", "abi3", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "gact_dist._native",
            sources=sorted(str(path) for path in Path("csrc/cpu").glob("*.cpp")),
            depends=sorted(str(path) for path in [*Path("csrc/common").glob("*.h"), *Path("csrc/cpu").glob("*.h")]),
            libraries=["torch_cpu"],
            optional=True,
        ),
        Extension(
            "gact_dist._hooks",
            sources=["csrc/hooks/hooks.cpp"],
            depends=["csrc/cpu/plain.h", *sorted(str(path) for path in Path("csrc/hooks").glob("*.h"))],
            optional=True,
        ),
    ],
    cmdclass={"bdist_wheel": PlatformWheel, "build_ext": BuildNative, "build_py": BuildPython},
)
