// An agent of Mastra, streamed.
import { Agent } from '@mastra/core/agent';
import { createTool } from '@mastra/core/tools';
import { z } from 'zod';
import { API_KEY, BASE_URL, INSTRUCTIONS, MODEL, PROMPT, bash } from './shell.mjs';

const shell = createTool({
  id: 'bash',
  description: 'Run a command.',
  inputSchema: z.object({ command: z.string() }),
  execute: (input) => bash(input.context ?? input),
});
const model = { id: `turnwise/${MODEL}`, url: BASE_URL, apiKey: API_KEY };
const agent = new Agent({ id: 'checker', name: 'checker', instructions: INSTRUCTIONS, model, tools: { bash: shell } });
const result = await agent.stream(PROMPT);
console.log(await result.text);
