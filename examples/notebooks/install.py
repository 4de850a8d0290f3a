# Installs zjax where it is missing, as in Colab.
import importlib.util
import shutil
import subprocess
import sys

# Or the URL of a wheel, or of a clone: file:///content/zjax
ZJAX = "git+https://github.com/zjax-project/zjax"
if importlib.util.find_spec("zjax") is None:
    gpu = "[cuda12]" if shutil.which("nvidia-smi") else ""
    command = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*command, f"zjax{gpu} @ {ZJAX}"], check=True)
