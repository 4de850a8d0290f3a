# Installs zjax where it is missing, as in Colab.
import importlib.util
import shutil
import subprocess
import sys

# The URL of a wheel, or of a clone: file:///content/zjax
ZJAX = ""
if importlib.util.find_spec("zjax") is None:
    assert ZJAX, "zjax is not installed; set ZJAX to the URL of its wheel or clone"
    gpu = "[cuda12]" if shutil.which("nvidia-smi") else ""
    command = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*command, f"zjax{gpu} @ {ZJAX}"], check=True)
