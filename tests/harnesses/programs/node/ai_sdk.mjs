// The loop of the Vercel AI SDK, streamed, for any of its providers.
import { stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { PROMPT, bash } from './shell.mjs';

export async function run(model) {
  const tools = {
    bash: tool({ description: 'Run a command.', inputSchema: z.object({ command: z.string() }), execute: bash }),
  };
  const result = streamText({ model, prompt: PROMPT, tools, stopWhen: stepCountIs(5) });
  for await (const part of result.textStream) process.stdout.write(part);
}
