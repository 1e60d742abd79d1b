// Two agents of the OpenAI Agents SDK, streamed; one is a tool of the other.
import { Agent, run, setTracingDisabled, tool } from '@openai/agents';
import { z } from 'zod';
import { INSTRUCTIONS, MODEL, PROMPT, bash } from './shell.mjs';

setTracingDisabled(true);
const shell = tool({ name: 'bash', description: 'Run.', parameters: z.object({ command: z.string() }), execute: bash });
const expert = new Agent({ name: 'Expert', instructions: 'You look at one part of a task.', model: MODEL });
const delegate = expert.asTool({ toolName: 'delegate', toolDescription: 'Give a task to another agent.' });
const agent = new Agent({ name: 'Agent', instructions: INSTRUCTIONS, model: MODEL, tools: [shell, delegate] });
const result = await run(agent, PROMPT, { stream: true });
await result.completed;
console.log(result.finalOutput);
