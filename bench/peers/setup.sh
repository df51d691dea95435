#!/bin/sh
# Makes the environments of the engines that serve.py compares Lamina with: DIR/openvino and DIR/llama_cpp.
# llama.cpp is built from source for this machine, which takes a compiler and about ten minutes of one core.
set -eu
[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
for name in openvino llama_cpp; do
    ${PYTHON:-python3} -m venv "$1/$name"
    pip="$1/$name/bin/pip install --quiet --disable-pip-version-check"
    # torch first and with what it needs; the others name all they need, so that nothing replaces it.
    [ "$name" != openvino ] || $pip torch==2.13.0
    $pip --no-deps -r "$here/$name.txt"
done
