// openai-node through the proxy: each check is one call with its helper; what fails says which.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const user = { role: "user", content: "Hello there" };
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const model = "fake";

const checks = {
  async create() {
    const done = await client.chat.completions.create({ model, messages: [user], n: 2 });
    assert.deepEqual(done.choices.map((choice) => choice.message.content), ["Hello there", "Hello there (1)"]);
  },
  async chunks() {
    let text = "";
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create({ model, messages: [user], ...options })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, "Hello there");
  },
  async streamHelper() {
    const final = await client.chat.completions.stream({ model, messages: [user] }).finalChatCompletion();
    assert.equal(final.choices[0].message.content, "Hello there");
  },
  async runTools() {
    const asked = [];
    const weather = {
      name: "weather",
      description: "Tell the weather of a city.",
      parameters,
      parse: JSON.parse,
      function: ({ city }) => (asked.push(city), `rain in ${city}`),
    };
    const runner = client.chat.completions.runTools({
      model,
      messages: [{ role: "user", content: "a loop" }],
      tools: [{ type: "function", function: weather }],
    });
    assert.equal(await runner.finalContent(), "a loop");
    assert.equal(asked.length, 1);
  },
  async parse() {
    const schema = { name: "city", schema: parameters, strict: true };
    const done = await client.chat.completions.parse({
      model,
      messages: [user],
      response_format: { type: "json_schema", json_schema: schema },
    });
    assert.equal(typeof JSON.parse(done.choices[0].message.content).city, "string");
  },
  async completions() {
    const done = await client.completions.create({ model, prompt: "Once", max_tokens: 4 });
    assert.ok(done.choices[0].text.length > 0);
  },
  async models() {
    assert.deepEqual((await client.models.list()).data.map((each) => each.id), [model]);
  },
  async responses() {
    const made = await client.responses.create({ model, input: "Hello there" });
    assert.equal(made.output_text, "Hello there");
    const next = await client.responses.create({ model, input: "again", previous_response_id: made.id });
    assert.equal(next.output_text, "again");
  },
  async responsesStream() {
    let text = "";
    const stream = client.responses.stream({ model, input: "Hello there" });
    stream.on("response.output_text.delta", (event) => (text += event.delta));
    assert.equal((await stream.finalResponse()).output_text, "Hello there");
    assert.equal(text, "Hello there");
  },
  async rawResponse() {
    const { data, response } = await client.chat.completions.create({ model, messages: [user] }).withResponse();
    assert.equal(response.status, 200);
    assert.ok(data.id.startsWith("chatcmpl-"));
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model: "policy-v0", messages: [user] }), OpenAI.NotFoundError);
    await assert.rejects(
      client.chat.completions.create({ model, messages: [user], temperature: -1 }),
      OpenAI.BadRequestError,
    );
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${name}: ${error.stack ?? error}`);
  }
}
process.exit(failed ? 1 : 0);
