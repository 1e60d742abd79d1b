// The task, the model, and the one tool of the programs beside this file.
import { exec } from 'node:child_process';
import { promisify } from 'node:util';

export const PROMPT = process.argv[2];
export const MODEL = process.env.OPENAI_MODEL;
export const BASE_URL = process.env.OPENAI_BASE_URL;
export const API_KEY = process.env.OPENAI_API_KEY;
export const INSTRUCTIONS = 'You are a helpful agent.';
export const PARAMETERS = { type: 'object', properties: { command: { type: 'string' } }, required: ['command'] };

const run = promisify(exec);

export async function bash({ command }) {
  const { stdout, stderr } = await run(command);
  return stdout + stderr;
}
