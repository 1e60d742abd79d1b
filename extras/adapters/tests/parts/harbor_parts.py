"""An agent and an environment for Harbor without containers: a directory in place of the file system's root."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import httpx
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult

PLACES = ("/logs", "/tests", "/app", "/solution", "/installed-agent")


class DirectoryEnvironment(BaseEnvironment):
    """Runs commands on this machine; the container's places are directories of the trial."""

    @staticmethod
    def type() -> str:
        return "directory"

    @property
    def root(self) -> Path:
        return self.trial_paths.trial_dir / "root"

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        for place in (*PLACES, "/logs/agent", "/logs/verifier", "/logs/artifacts"):
            self._inside(place).mkdir(parents=True, exist_ok=True)

    async def stop(self, delete: bool) -> None:
        pass

    async def upload_file(self, source_path, target_path) -> None:
        shutil.copy(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path) -> None:
        shutil.copy(self._inside(source_path), target_path)

    async def download_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(self._inside(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        for place in PLACES:
            command = command.replace(place, str(self._inside(place)))
        process = await asyncio.create_subprocess_shell(
            command,
            cwd=self._inside("/app"),
            env={**os.environ, "ROOT": str(self.root), **(env or {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=errors.decode(), return_code=process.returncode)

    def _inside(self, path) -> Path:
        return self.root / str(path).lstrip("/")


class OneCallAgent(BaseAgent):
    """Asks the model once and writes its reply to a file."""

    @staticmethod
    def name() -> str:
        return "one-call"

    def version(self) -> str:
        return "1"

    async def setup(self, environment) -> None:
        pass

    async def run(self, instruction, environment, context) -> None:
        async with httpx.AsyncClient() as http:
            answer = await http.post(
                f"{self.extra_env['OPENAI_BASE_URL']}/chat/completions",
                headers={"authorization": f"Bearer {self.extra_env['OPENAI_API_KEY']}"},
                json={"model": "fake", "messages": [{"role": "user", "content": instruction}]},
            )
        answer.raise_for_status()
        text = answer.json()["choices"][0]["message"]["content"]
        await environment.exec(f"printf %s '{text}' > /app/answer.txt")
